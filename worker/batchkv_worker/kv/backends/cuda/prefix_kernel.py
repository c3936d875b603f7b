"""Attention with shared prefixes in a decode step, between two products, as one CUDA kernel.

With MLX's own kernels this part takes six launches a layer. Two of them are products of a few lines
each, which cost the host more than all others. The inputs are the scores of the prefixes. The
kernel attends to each row's own tokens, the suffix, and returns the softmax weights of the
prefixes. A product outside multiplies these by the values of the prefixes. The kernel is used where
it compiles, gives the same answers, and is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

from batchkv_worker.kv.backends.cuda.prefix_kernel_source import WARPS, Variant
from batchkv_worker.kv.schemes.packing import LayerShape

MAX_NUMBERS = 1280  # values of all query heads of a KV head; each warp has them in shared memory


@cache
def _kernel(variant: Variant) -> Any:
    return mx.fast.cuda_kernel(
        *(variant.name, variant.inputs, variant.outputs, variant.source),
        ensure_row_contiguous=False,
    )


@dataclass(frozen=True, slots=True)
class CudaPrefixKernel:
    """The kernel for layers with ``lines`` query heads for each KV head, in ``dtype``."""

    lines: int
    dtype: mx.Dtype

    def fits(self, shape: LayerShape) -> bool:
        """Whether layers of that shape can use the kernel."""
        whole_warps = shape.key_size % 32 == 0 and shape.value_size % 32 == 0
        return whole_warps and self.lines * shape.value_size <= MAX_NUMBERS

    def takes(self, lines: int, dtype: mx.Dtype) -> bool:
        """Whether the kernel is for so many query heads and this dtype."""
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
        """The output over the rows' own tokens and ``partials``, and the weights of the prefixes.

        ``queries`` ``[rows, kv heads, lines, size]`` are scaled. ``prefix_scores`` are ``[1, kv
        heads, rows * lines, columns]``. ``partials`` are scores ``[kv heads, rows, lines, 1]`` in
        float32 and values ``[kv heads, rows, lines, size]``. ``keys`` and ``values`` ``[rows, kv
        heads, columns, size]`` are dense. ``mask`` is bool, ``[rows or 1, ..., columns]``. Returns
        ``[1, kv heads, rows * lines, size]``, and weights in the shape of each of
        ``prefix_scores``. The caller adds the prefixes' weighted values to the first.
        """
        rows, kv_heads, lines, size = queries.shape
        value_size = values.shape[-1]
        variant = Variant(len(prefix_scores), len(partials), mask is not None, sinks is not None)
        rest = []
        if mask is not None:
            assert mask.dtype == mx.bool_  # an additive mask would mean the opposite
            columns = keys.shape[2]
            rest.append(mx.contiguous(mx.broadcast_to(mask.reshape(-1, columns), (rows, columns))))
        if sinks is not None:
            rest.append(sinks.astype(queries.dtype))
        given = [mx.contiguous(queries), keys, values, *prefix_scores, *sum(partials, ())]
        suffix_output, *weights = _kernel(variant)(
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
        return suffix_output, weights
