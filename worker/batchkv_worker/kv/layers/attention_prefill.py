"""Prefill of a layer that keeps keys and values.

Rows of a group start together and are right-padded. Under a causal mask no real token sees a pad,
so nothing is rolled or finalized, and row j is simply ``[:length[j]]``. Keys and values are packed
at once, and attention always reads the packed values, for the chunk itself as for its history. So
neither chunk size nor batch changes the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from batchkv_cache_store.keys import BLOCK_TOKENS
from batchkv_worker.kv.attention import paths, shared_prefix_prefill
from batchkv_worker.kv.attention.paths import Attend, LayerAttention
from batchkv_worker.kv.backends.contract import ChunkKernels, Pacing
from batchkv_worker.kv.backends.generic import round_up
from batchkv_worker.kv.backends.pacing import UNPACED
from batchkv_worker.kv.kernels.value_parts import VALUE_PARTS
from batchkv_worker.kv.layers.cache_quirks import OrderedByUs
from batchkv_worker.kv.layers.chunk_packing import ChunkPacking, DenseChunk
from batchkv_worker.kv.layers.contract import Chunk, PrefillLayer
from batchkv_worker.kv.layers.stand_ins import StandIns, replaced
from batchkv_worker.kv.types import PackedKV, Parts, Pieces, Window


class AttentionPrefill(OrderedByUs, PrefillLayer):
    """Packed keys and values, ``[rows, heads, columns, part size]``; column 0 is token ``base``.

    With a window, each chunk drops tokens that no later token sees, except for one block: the block
    that the chunk before began is still to be stored.
    """

    def __init__(
        self,
        layer: LayerAttention,
        window: Window,
        capacity: int,
        chunk_tokens: int,
        *,
        is_read: bool = True,
        kernels: ChunkKernels | None = None,
    ) -> None:
        """For prompts of up to ``capacity`` tokens in chunks of up to ``chunk_tokens``.

        Without ``is_read`` the model gets stand-ins of dense arrays (``StandIns``) where it leaves
        attention to ``attend``. ``kernels`` pack chunks, if there are any.
        """
        self.offset = 0  # tokens so far; the models read it
        self.base = 0
        self.pacing: Pacing = UNPACED  # shared by all layers of a group
        self._layer, self._dequantized = layer, layer.dequantized
        self._scheme = layer.scheme
        self._packing = ChunkPacking(layer, kernels)
        self._chunk: DenseChunk | None = None  # the last one, until it is attended to
        self._window = window
        self._dtype = layer.dtype
        self._kept = None if window is None else window - 1 + BLOCK_TOKENS
        self._capacity = capacity if window is None else min(capacity, window + chunk_tokens)
        self._keys: list[mx.array] = []
        self._values: list[mx.array] = []
        self._handed: tuple[mx.array, mx.array] | None = None
        self._shared: tuple[PackedKV, ...] = ()
        self._unread = None if is_read else StandIns(layer)
        self._is_unread = False  # whether the last update handed out stand-ins

    # -- calls by the engine

    def begin(self, chunk: Chunk) -> None:
        if chunk.position != self.offset:
            raise ValueError(f"a chunk at {chunk.position} cannot follow {self.offset} tokens")
        # A row that has ended already still needs its own last window when it moves to its slot.
        all_go_on = chunk.lengths is None or min(chunk.lengths) > 0
        if self._kept is not None and all_go_on and self.offset - self.base > self._kept:
            first = self.offset - self._kept - self.base
            self._keys = [part[..., first : self.offset - self.base, :] for part in self._keys]
            self._values = [part[..., first : self.offset - self.base, :] for part in self._values]
            self.base += first

    def end(self) -> None:
        # Otherwise the dense histories of all layers would be in memory at once.
        self._handed = self._chunk = None

    def restore(self, pieces: Pieces, first: int, end: int) -> None:
        self._keys, self._values = map(list, self._scheme.split(pieces))
        self.base, self.offset = first, end

    def share(self, prefixes: Sequence[PackedKV], num_tokens: int) -> None:
        """Start after a chain of prefixes, ``[1, ...]`` for all rows or ``[rows, ...]``.

        Restored pieces follow the prefixes. Only for models that leave attention to ``attend``,
        because their dense keys and values lack the prefixes.
        """
        self._shared = tuple(prefixes)
        self.base = self.offset = num_tokens
        self._capacity -= num_tokens

    def share_each(self, pieces: Pieces, num_tokens: int) -> None:
        self.share([self._scheme.split(pieces)], num_tokens)

    def row(self, index: int, length: int, prefix_tokens: int = 0, count: int = 1) -> Pieces:
        start = prefix_tokens if self._window is None else max(0, length - self._window + 1)
        return self._cut(index, count, start, length)

    def block(self, index: int, start: int, end: int, count: int = 1) -> Pieces:
        return self._cut(index, count, start, end)

    def _cut(self, index: int, count: int, start: int, end: int) -> Pieces:
        if start < self.base and self._shared:  # a prefix has the first of these tokens
            own = self._cut(index, count, self.base, end)
            before = _last_columns(self._shared, self.base - start)
            rows = [part if part.shape[0] == 1 else part[index : index + count] for part in before]
            lines = [mx.broadcast_to(part, (count, *part.shape[1:])) for part in rows]
            return tuple(mx.concatenate(both, axis=-2) for both in zip(lines, own, strict=True))
        if not self.base <= start <= end <= self.offset:
            raise ValueError(f"tokens {start} to {end} are not in {self.base} to {self.offset}")
        low, high = start - self.base, end - self.base
        return tuple(part[index : index + count, ..., low:high, :] for part in self.arrays)

    @property
    def arrays(self) -> list[mx.array]:
        return [*self._keys, *self._values]

    # -- calls by the model

    def make_mask(
        self, num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> Any:
        past = self.offset - self.base
        window = min((w for w in (window_size, self._window) if w is not None), default=None)
        if window is not None and past + num_tokens > window:
            return create_causal_mask(num_tokens, past, window_size=window)
        if num_tokens == 1:  # as mlx-lm's own caches, whatever is asked for
            return None
        return create_causal_mask(num_tokens, past) if return_array else "causal"

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Take a chunk ``[rows, heads, tokens, size]``; what attention sees up to its end."""
        start = self.offset - self.base
        end = start + keys.shape[-2]
        self._is_unread = self._unread is not None and self.attend is not None
        tokens = keys.shape[-2]
        (packed_keys, packed_values), self._chunk = self._packing.pack(
            keys,
            VALUE_PARTS.of(keys, values),
            self._shared,
            is_dense=start == 0 and tokens > 1 and self._is_unread,
            is_padded=self._window is None or tokens <= self._window,
        )
        self._store(self._keys, packed_keys, start, end)
        self._store(self._values, packed_values, start, end)
        self.offset += keys.shape[-2]
        if self._unread is not None and self._is_unread:
            self._handed = self._unread.of(keys.shape[0], end)
        else:
            self._handed = self._read()
        return self._handed

    def _read(self) -> tuple[mx.array, mx.array]:
        end = self.offset - self.base
        return (
            self._scheme.keys.unpack(_columns(self._keys, end), self._dtype),
            self._scheme.values.unpack(_columns(self._values, end), self._dtype),
        )

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The result of the last update, for layers without keys of their own."""
        if self._handed is None:
            raise ValueError("no keys have been computed in this chunk")
        return self._handed

    def dense(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """These arrays, and in the place of stand-ins what they stand for."""
        if not self._is_unread or self._handed is None:
            return keys, values
        return replaced(self._handed, keys, values, self._read)

    def handed_out(self, keys: Any, values: Any, mask: Any) -> bool:
        """Whether these are the result of the last update, with any mask."""
        return self._handed is not None and keys is self._handed[0] and values is self._handed[1]

    @property
    def attend(self) -> Attend | None:
        """The function that the hook calls instead of the model's attention; None: call that."""
        backend, shape = self._layer.backend, self._scheme.shape
        is_better = backend.plans_attention(self._dtype, shape.key_size)
        is_better = is_better or not backend.has_fused_attention
        return self._attend if is_better or self._scheme.is_packed or self._shared else None

    def _attend(
        self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None
    ) -> mx.array:
        """In the stored basis: rotating the queries costs less than rotating the history back.

        Then the result of ``update_and_fetch`` is never computed. So dense arrays exist in one
        layer at a time only, and layers can run one after the other (``Pacing``).
        """
        end = self.offset - self.base
        chunk, self._chunk = self._chunk, None
        if chunk is not None:
            out = chunk.attend(self._layer, queries, self._shared, scale, mask, sinks)
            num_dense, is_joined = chunk.num_numbers, chunk.before > 0
            del chunk  # else it would outlive its attention, for which the next lines may wait
        else:
            out = self._attend_packed(queries, end, scale, mask, sinks)
            num_dense, is_joined = self._num_copied(queries, end, mask), False
        if self._shared and not is_joined:  # then each row has a copy of its prefixes, too
            end += sum(keys[0].shape[-2] for keys, _ in self._shared)
            num_dense += self._num_numbers(queries.shape[0], end)
        self.pacing.follow(out, num_dense)
        return out

    def _num_copied(self, queries: mx.array, columns: int, mask: Any) -> int:
        """Of dense keys and values that only exist for this attention, with pads."""
        rows, _, length, _ = queries.shape
        shape, padded = self._scheme.shape, (rows, columns)
        if isinstance(mask, str):
            numbers = shape.num_heads * shape.key_size
            backend = self._layer.backend
            padded = backend.attended_shape(rows, length, columns, numbers)[::2]
        is_copied = self._scheme.is_packed or padded != (rows, columns)
        return self._num_numbers(*padded) if is_copied else 0

    def _num_numbers(self, rows: int, columns: int) -> int:
        """Of dense keys and values."""
        shape = self._scheme.shape
        return rows * columns * shape.num_heads * (shape.key_size + shape.value_size)

    def _attend_packed(
        self, queries: mx.array, end: int, scale: float, mask: Any, sinks: mx.array | None
    ) -> mx.array:
        """Attention to the first ``end`` columns of the stored parts, and to shared prefixes."""
        layer, shared = self._layer, self._shared
        keys, values = tuple(self._keys), tuple(self._values)
        read = self._columns_read(end, keys[0].shape[-2])
        if read > end:
            stored = _columns(keys, read), _columns(values, read)
            layer, (keys, values) = self._dequantized, layer.dequantize(stored)
            shared = tuple(self._layer.dequantize(one) for one in shared)
        keys, values = _columns(keys, end), _columns(values, end)
        if not shared:
            return paths.attend(layer, queries, keys, values, scale, mask, sinks)
        return shared_prefix_prefill.attend_chunk(
            layer, queries, shared, (keys, values), scale, mask, sinks
        )

    def _columns_read(self, end: int, columns: int) -> int:
        """How many of a buffer's columns to unpack, of which the first ``end`` are read.

        More of them have sizes that come again, or lie in one piece.
        """
        if end == columns or not self._scheme.is_packed:
            return end
        if self._layer.reads_whole(end, columns):
            return columns
        return min(columns, round_up(end, self._layer.backend.history_multiple))

    def _store(self, parts: list[mx.array], packed: Parts, start: int, end: int) -> None:
        if start == 0 and end >= self._capacity:  # the whole row in one chunk
            parts[:] = packed
            return
        if not parts or parts[0].shape[-2] < end:
            columns = max(end, self._capacity)
            parts[:] = [
                _widened(part if parts else None, piece, columns, start)
                for part, piece in zip(parts or packed, packed, strict=True)
            ]
        for part, piece in zip(parts, packed, strict=True):
            part[..., start:end, :] = piece


def _widened(part: mx.array | None, like: mx.array, columns: int, used: int) -> mx.array:
    """A buffer of ``columns`` columns that begins with the used ones of ``part``."""
    if part is None:
        return mx.zeros((*like.shape[:-2], columns, like.shape[-1]), like.dtype)
    rest = mx.zeros((*part.shape[:-2], columns - used, part.shape[-1]), part.dtype)
    return mx.concatenate([part[..., :used, :], rest], axis=-2)


def _last_columns(prefixes: Sequence[PackedKV], count: int) -> Pieces:
    """The last tokens of a chain of prefixes, ``[1 or rows, heads, count, part size]``."""
    lines: list[Pieces] = []
    for keys, values in reversed(prefixes):
        columns = keys[0].shape[-2]
        low = max(0, columns - count)
        lines.insert(0, tuple(part[..., low:, :] for part in (*keys, *values)))
        count -= columns - low
        if not count:
            break
    return tuple(mx.concatenate(parts, axis=-2) for parts in zip(*lines, strict=True))


def _columns(parts: Sequence[mx.array], end: int) -> Parts:
    return tuple(part if part.shape[-2] == end else part[..., :end, :] for part in parts)
