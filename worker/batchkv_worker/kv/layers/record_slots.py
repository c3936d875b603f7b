"""Decode slots that keep records: of each token one run of words with its keys and values.

One kernel packs a step's keys and values, one operation writes them, and one kernel reads them.
Rows come and leave as the parts that any other slots take and give, bit for bit.
"""

from __future__ import annotations

import mlx.core as mx

from batchkv_worker.kv.attention import records
from batchkv_worker.kv.backends.contract import RecordKernels
from batchkv_worker.kv.layers.attention_slots import AttentionSlots
from batchkv_worker.kv.slots.changes import Relayout
from batchkv_worker.kv.slots.step_view import ColumnSpan
from batchkv_worker.kv.types import PackedKV, Parts, Pieces


class RecordSlots(AttentionSlots):
    """One buffer of uint32, ``[slots, heads, capacity, words]``, for layers of the path ``kernel``.

    Its scheme is that of pieces, so a shared prefix is stored in one form for prefill and decode.
    """

    def _take(self, pieces: Pieces) -> Pieces:
        return (records.join(self._layer, *self._packed.split(pieces)),)

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
        if span.segments:
            shared = [(one.prefix.slots[self.place], one.first, one.last) for one in span.segments]
            partials = records.partials_of(self._layer, queries, shared, span.chain, scale)
        what = self._keys[0], span.bounds, span.longest, scale, sinks, partials
        return records.attend(self._layer, queries, *what)
