"""What a decode step does between the two products of a stem, as one kernel: on CUDA.

Put together from MLX's own kernels that is six starts a layer, two of them products of a few lines
each, which cost a host more than all else. The kernel takes the scores of stems, attends to what
each row has of its own, and gives the stems' weights, with which the values of stems are multiplied
next. It is used where it compiles, answers what the other way does, and is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

from batchkv_worker.kv.backends.cuda.prefix_kernel_source import WARPS, Kind
from batchkv_worker.kv.backends.device import is_cuda
from batchkv_worker.kv.schemes.packing import LayerScheme

MAX_NUMBERS = 1280  # values of the query heads of one KV head: they stand in shared memory, by warp


@cache
def _kernel(kind: Kind) -> Any:
    return mx.fast.cuda_kernel(
        kind.name, kind.inputs, kind.outputs, kind.source, ensure_row_contiguous=False
    )


def weigh(
    queries: mx.array,
    far: Sequence[mx.array],
    before: Sequence[tuple[mx.array, mx.array]],
    keys: mx.array,
    values: mx.array,
    mask: mx.array | None,
    sinks: mx.array | None,
) -> tuple[mx.array, list[mx.array]]:
    """What rows find in their own tokens, and the weights of what stems hold.

    ``queries`` ``[rows, kv heads, lines, size]`` are scaled, ``far`` are their scores
    ``[1, kv heads, rows * lines, columns]`` in stems, ``before`` scores ``[kv heads, rows, lines,
    1]`` in float32 and values ``[kv heads, rows, lines, size]`` of summaries; ``keys`` and
    ``values`` ``[rows, kv heads, columns, size]`` are dense, ``mask`` is bool, ``[rows or
    1, ..., columns]``. Returns ``[1, kv heads, rows * lines, size]``, to which the stems' weighted
    values are to be added, and weights in the shape of each of ``far``.
    """
    rows, kv_heads, lines, size = queries.shape
    value_size = values.shape[-1]
    kind = Kind(len(far), len(before), mask is not None, sinks is not None)
    rest = []
    if mask is not None:
        assert mask.dtype == mx.bool_  # what is added would be read as its opposite
        columns = keys.shape[2]
        rest.append(mx.contiguous(mx.broadcast_to(mask.reshape(-1, columns), (rows, columns))))
    if sinks is not None:
        rest.append(sinks.astype(queries.dtype))
    near, *weights = _kernel(kind)(
        inputs=[mx.contiguous(queries), keys, values, *far, *sum(before, ()), *rest],
        template=[
            ("T", queries.dtype),
            ("KEY_SIZE", size),
            ("VALUE_SIZE", value_size),
            ("LINES", lines),
            ("WARPS", WARPS),
        ],
        grid=(kv_heads * WARPS * 32, rows, 1),
        threadgroup=(WARPS * 32, 1, 1),
        output_shapes=[(1, kv_heads, rows * lines, value_size), *(part.shape for part in far)],
        output_dtypes=[queries.dtype] * (1 + len(far)),
    )
    return near, weights


@dataclass(frozen=True, slots=True)
class Layer:
    """What decides about the kernel: ``scheme`` in slots, query heads of one KV head, dtype."""

    scheme: LayerScheme
    lines: int
    dtype: mx.Dtype


_chosen: set[Layer] = set()


def is_chosen(layer: Layer) -> bool:
    """Whether layers like that use the kernel, in this process."""
    return layer in _chosen


def choose(layer: Layer, *, is_used: bool) -> None:
    """Let layers like that use the kernel, or not."""
    (_chosen.add if is_used else _chosen.discard)(layer)


def fits(layer: Layer) -> bool:
    """Whether there is a kernel for such layers on this device."""
    shape = layer.scheme.shape
    whole_warps = shape.key_size % 32 == 0 and shape.value_size % 32 == 0
    return is_cuda() and whole_warps and layer.lines * shape.value_size <= MAX_NUMBERS
