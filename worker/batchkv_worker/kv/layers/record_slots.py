"""Decode slots that keep records: of each token one run of words with its keys and values.

One kernel packs a step's keys and values, one operation writes them, and one kernel reads them.
Rows come and leave as the parts that any other slots take and give, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

import mlx.core as mx

from batchkv_worker.kv.attention import records
from batchkv_worker.kv.backends.contract import RecordKernels
from batchkv_worker.kv.kernels.launch import LEAST_NUMBERS
from batchkv_worker.kv.layers.attention_prefill import AttentionPrefill
from batchkv_worker.kv.layers.attention_slots import AttentionSlots
from batchkv_worker.kv.layers.contract import PrefillLayer
from batchkv_worker.kv.slots.changes import Arrivals, Relayout
from batchkv_worker.kv.slots.pool_view import PoolView
from batchkv_worker.kv.slots.prefix_pool import Place
from batchkv_worker.kv.slots.step_view import ColumnSpan, StepView
from batchkv_worker.kv.types import PackedKV, Parts, Pieces


class RecordSlots(AttentionSlots):
    """One buffer of uint32, ``[slots, heads, capacity, words]``, for layers of the path ``kernel``.

    Its scheme is that of pieces, so a shared prefix is stored in one form for prefill and decode.
    Where a step attends to prefixes in the pool (``PoolView``), their records are copied there.
    """

    _pool: mx.array | None = None
    _version = _state = 0  # of the pool, as it is in ``_pool``
    _places: Mapping[int, Place] = MappingProxyType({})

    def begin(self, view: StepView) -> None:
        super().begin(view)
        self._fill(self.span.pool)

    def _fill(self, view: PoolView | None) -> None:
        """Make the pool what the step at hand reads."""
        if view is None:
            self._pool, self._version, self._state, self._places = None, 0, 0, {}
            return
        if view.state == self._state:
            return
        known, pool = self._places, self._pool
        if pool is None or view.version != self._version:
            shape = 1, self._scheme.shape.num_heads, view.capacity, self._records.layout.words
            old, pool = pool, mx.zeros(shape, mx.uint32)
            for low, high, at in view.runs(known):
                assert old is not None  # it had what is known
                pool[..., at : at + high - low, :] = old[..., low:high, :]
            known = {rank: view.places[rank] for rank in known if rank in view.places}
        for rank, (low, high) in view.places.items():
            if known.get(rank) != (low, high):
                packed = view.parts[rank].slots[self.place]
                pool[..., low:high, :] = records.of_prefix(self._layer, *packed)
        self._pool, self._places = pool, view.places
        self._version, self._state = view.version, view.state

    def drop(self) -> None:
        super().drop()
        self.drop_pool()

    def drop_pool(self) -> None:
        self._fill(None)

    @property
    def arrays(self) -> list[mx.array]:
        return [*self._keys, *([] if self._pool is None else [self._pool])]

    def swap(self, arrays: list[mx.array]) -> None:
        self._keys, pool = arrays[:1], arrays[1:]
        self._pool = pool[0] if pool else None

    def _take(self, pieces: Pieces) -> Pieces:
        return (records.join(self._layer, *self._packed.split(pieces)),)

    def admit_group(self, rows: Arrivals, write: int, source: PrefillLayer) -> bool:
        assert isinstance(source, AttentionPrefill)
        keys, values = self._packed.split(tuple(source.arrays))
        if min(part.size for part in (*keys, *values)) < LEAST_NUMBERS:
            return False
        if self._window is None and any(row.shared < source.base for row in rows.rows):
            return False  # a prefix has tokens that they keep as their own
        self._wait()
        (buffer,) = self._keys
        places = rows.places(write, self._window, source.base)
        new = records.place_rows(self._layer, places, keys, values, buffer.shape[-2])
        first, last = rows.slots[0], rows.slots[-1]
        if last - first < len(rows.slots):
            buffer[first : last + 1] = new
        else:
            buffer[_slots_of(rows.slots)] = new
        return True

    def _give(self, keys: Parts, values: Parts) -> Pieces:
        packed_keys, packed_values = self._records.layout.split(keys[0])
        return (*packed_keys, *packed_values)

    def as_prefix(self, pieces: Pieces) -> tuple[PackedKV, PackedKV]:
        packed = self._packed.split(pieces)
        return packed, packed

    def _make_buffers(self, change: Relayout) -> None:
        heads = self._scheme.shape.num_heads
        shape = change.rows, heads, change.capacity, self._records.layout.words
        self._keys = [mx.zeros(shape, mx.uint32)]

    @property
    def _records(self) -> RecordKernels:
        return records.kernels_of(self._layer)

    @property
    def is_exact(self) -> bool:
        return False

    def _write(self, span: ColumnSpan, keys: mx.array, values: mx.array) -> None:
        self._keys = [span.store(self._keys[0], records.pack(self._layer, keys, values))]

    def _read(self) -> tuple[mx.array, mx.array]:
        span = self.span
        cells = slice(span.num_rows), slice(None), slice(span.low, span.high)
        keys, values = self._records.layout.split(self._keys[0][cells])
        scheme = self._scheme
        return scheme.keys.unpack(keys, self._dtype), scheme.values.unpack(values, self._dtype)

    def _attention(self, queries: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        span, partials = self.span, None
        if (view := span.pool) is not None:
            assert self._pool is not None
            what = self._pool, view.levels, view.chain, scale
            partials = records.pooled(self._layer, queries, *what)
        elif span.segments:
            shared = [(one.prefix.slots[self.place], one.first, one.last) for one in span.segments]
            partials = records.partials_of(self._layer, queries, shared, span.chain, scale)
        rest = self._keys[0], span.bounds, span.longest, scale, sinks, partials
        return records.attend(self._layer, queries, *rest)


@lru_cache(maxsize=4)
def _slots_of(slots: tuple[int, ...]) -> mx.array:
    """The same array for all layers."""
    return mx.array(slots, mx.int32)
