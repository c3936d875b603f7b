"""What a decode step does between the two products of a shared prefix, as one CUDA kernel.

Put together from MLX's own kernels that is six launches a layer. Two of them are products of a few
lines each, which cost a host more than all else. The kernel takes the scores of prefixes, attends
to what each row has of its own, and gives the prefixes' weights, which then multiply the values of
the prefixes. It is used where it compiles, gives the same answers, and is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

from batchkv_worker.kv.backends.cuda.prefix_kernel_source import WARPS, Kind
from batchkv_worker.kv.schemes.packing import LayerShape

MAX_NUMBERS = 1280  # values of the query heads of one KV head: they are in shared memory, by warp


@cache
def _kernel(kind: Kind) -> Any:
    return mx.fast.cuda_kernel(
        kind.name, kind.inputs, kind.outputs, kind.source, ensure_row_contiguous=False
    )


@dataclass(frozen=True, slots=True)
class CudaPrefixKernel:
    """For layers with ``lines`` query heads a KV head, in ``dtype``."""

    lines: int
    dtype: mx.Dtype

    def fits(self, shape: LayerShape) -> bool:
        """Whether layers of that shape can use it."""
        whole_warps = shape.key_size % 32 == 0 and shape.value_size % 32 == 0
        return whole_warps and self.lines * shape.value_size <= MAX_NUMBERS

    def takes(self, lines: int, dtype: mx.Dtype) -> bool:
        """Whether it was made for these."""
        return (lines, dtype) == (self.lines, self.dtype)

    def weigh(
        self,
        queries: mx.array,
        prefix_scores: Sequence[mx.array],
        partials: Sequence[tuple[mx.array, mx.array]],
        keys: mx.array,
        values: mx.array,
        mask: mx.array | None,
        sinks: mx.array | None,
    ) -> tuple[mx.array, list[mx.array]]:
        """What rows find in their own tokens, and the weights of what prefixes hold.

        ``queries`` ``[rows, kv heads, lines, size]`` are scaled. ``prefix_scores`` are ``[1, kv
        heads, rows * lines, columns]``. ``partials`` are scores ``[kv heads, rows, lines, 1]`` in
        float32 and values ``[kv heads, rows, lines, size]``. ``keys`` and ``values`` ``[rows, kv
        heads, columns, size]`` are dense. ``mask`` is bool, ``[rows or 1, ..., columns]``. Returns
        ``[1, kv heads, rows * lines, size]``, to which the prefixes' weighted values are to be
        added, and weights in the shape of each of ``prefix_scores``.
        """
        rows, kv_heads, lines, size = queries.shape
        value_size = values.shape[-1]
        kind = Kind(len(prefix_scores), len(partials), mask is not None, sinks is not None)
        rest = []
        if mask is not None:
            assert mask.dtype == mx.bool_  # what is added would be read as its opposite
            columns = keys.shape[2]
            rest.append(mx.contiguous(mx.broadcast_to(mask.reshape(-1, columns), (rows, columns))))
        if sinks is not None:
            rest.append(sinks.astype(queries.dtype))
        given = [mx.contiguous(queries), keys, values, *prefix_scores, *sum(partials, ())]
        own, *weights = _kernel(kind)(
            inputs=[*given, *rest],
            template=[
                ("T", queries.dtype),
                ("KEY_SIZE", size),
                ("VALUE_SIZE", value_size),
                ("LINES", lines),
                ("WARPS", WARPS),
            ],
            grid=(kv_heads * WARPS * 32, rows, 1),
            threadgroup=(WARPS * 32, 1, 1),
            output_shapes=[
                (1, kv_heads, rows * lines, value_size),
                *(part.shape for part in prefix_scores),
            ],
            output_dtypes=[queries.dtype] * (1 + len(prefix_scores)),
        )
        return own, weights
