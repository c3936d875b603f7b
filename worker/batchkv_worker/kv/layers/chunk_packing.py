"""How a layer packs the keys and values of a chunk, and attends to them at once.

Attention reads what the packed numbers give back, so that neither the size of chunks nor a hit in
the cache changes a result. A chunk without history can get both from one kernel: the parts, and
dense numbers in the shape that attention takes, behind those of a prefix that all rows share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from batchkv_worker.kv.attention import paths, shared_prefix_prefill
from batchkv_worker.kv.attention.paths import LayerAttention
from batchkv_worker.kv.backends.contract import ChunkKernels
from batchkv_worker.kv.kernels.chunk import MOST_COLUMNS
from batchkv_worker.kv.kernels.launch import LEAST_NUMBERS, Input, arrays_of
from batchkv_worker.kv.types import PackedKV


@dataclass(frozen=True, slots=True)
class DenseChunk:
    """Dense keys and values of a chunk, behind ``before`` columns of a shared prefix.

    They may have more rows than the chunk, and more columns, all zeros.
    """

    keys: mx.array
    values: mx.array
    before: int = 0

    @property
    def num_numbers(self) -> int:
        """Of both arrays."""
        return int(self.keys.size + self.values.size)

    def attend(
        self,
        layer: LayerAttention,
        queries: mx.array,
        shared: Sequence[PackedKV],
        scale: float,
        mask: Any,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attention of the chunk's ``queries``; a ``mask`` that is a word means causal.

        ``layer`` reads the packed parts of the ``shared`` prefixes.
        """
        rows, _, length, _ = queries.shape
        dense = layer.dequantized
        if not isinstance(mask, str) or (shared and not self.before):
            own = slice(self.before, self.before + length)
            keys, values = ((one[:rows, :, own],) for one in (self.keys, self.values))
            if not shared:
                return paths.attend(dense, queries, keys, values, scale, mask, sinks)
            prefixes = [layer.dequantize(one) for one in shared]
            both = keys, values
            return shared_prefix_prefill.attend_chunk(
                dense, queries, prefixes, both, scale, mask, sinks
            )
        padded, more = self.keys.shape[0] - rows, self.keys.shape[2] - self.before - length
        if padded or more:
            queries = mx.pad(queries, [(0, padded), (0, 0), (0, more), (0, 0)])
        out = paths.attend(dense, queries, (self.keys,), (self.values,), scale, mask, sinks)
        return out[:rows, :, :length] if padded or more else out


class ChunkPacking:
    """Packs the chunks of one layer: by a kernel where there is one, else by the scheme."""

    def __init__(self, layer: LayerAttention, kernels: ChunkKernels | None) -> None:
        """``layer`` reads packed parts."""
        self._layer, self._kernels = layer, kernels
        # Packed values are arrays of their own.
        self._copies = layer.backend.copies_values and not layer.scheme.values.is_packed

    def pack(
        self,
        keys: mx.array,
        values: Input,
        shared: Sequence[PackedKV],
        *,
        is_dense: bool,
        is_padded: bool,
    ) -> tuple[PackedKV, DenseChunk | None]:
        """The parts of ``[rows, kv heads, tokens, size]``, as the model has them.

        ``is_dense``: also the dense chunk, if there is a kernel for it. It attends to itself and to
        the ``shared`` prefixes alone; ``is_padded``: under a causal mask, which hides pads.
        """
        scheme, dtype, kernels = self._layer.scheme, self._layer.dtype, self._kernels
        (dense_values,) = arrays_of([values])
        is_other = {keys.dtype, values.dtype} != {dtype} or keys.shape[2] > MOST_COLUMNS
        if kernels is None or is_other:
            if self._copies:
                dense_values = mx.contiguous(dense_values)
            return (scheme.keys.pack(keys), scheme.values.pack(dense_values)), None
        stored = scheme.keys.rotate(keys)
        given = scheme.values.rotate(dense_values) if scheme.values.is_rotated else values
        if not is_dense:
            return kernels.pack(stored, given), None
        prefix, rows, tokens = self._sizes(keys, shared, is_padded=is_padded)
        packed, (dense_keys, dense) = kernels.pack_and_give(stored, given, prefix, rows, tokens)
        before = 0 if prefix is None else prefix[0][0].shape[2]
        return packed, DenseChunk(dense_keys, dense, before)

    def _sizes(
        self, keys: mx.array, shared: Sequence[PackedKV], *, is_padded: bool
    ) -> tuple[PackedKV | None, int, int]:
        """The prefix that comes before a dense chunk, if any, and the chunk's rows and tokens."""
        backend, shape = self._layer.backend, self._layer.scheme.shape
        rows, _, tokens, _ = keys.shape
        columns = tokens + sum(one[0][0].shape[2] for one in shared)
        padded, more = rows, 0
        if is_padded:
            numbers = shape.num_heads * shape.key_size
            padded, more = backend.padded_chunk(rows, tokens, columns, numbers)
        if not shared:
            return None, padded, min(tokens + more, MOST_COLUMNS)
        each = shape.num_heads * (shape.key_size + shape.value_size)
        columns += more
        is_small = columns <= MOST_COLUMNS and padded * columns * each <= backend.most_joined
        is_joined = len(shared) == 1 and is_padded and backend.has_fused_attention
        if not is_joined or not is_small or not self._can_read(shared[0]):
            return None, rows, tokens
        return shared[0], padded, tokens + more

    def _can_read(self, prefix: PackedKV) -> bool:
        """Whether the kernel reads such parts: of its dtype, and not too few numbers for Metal."""
        return all(
            part.size >= LEAST_NUMBERS and part.dtype in (mx.uint32, self._layer.dtype)
            for parts in prefix
            for part in parts
        )
