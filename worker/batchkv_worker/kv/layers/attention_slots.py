"""Decode slots of a layer that keeps keys and values, all of them or those of a window."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from batchkv_worker.kv.attention import paths, shared_prefix
from batchkv_worker.kv.attention.paths import Attend, LayerAttention
from batchkv_worker.kv.attention.shared_prefix import PartialAttention
from batchkv_worker.kv.kernels.value_parts import VALUE_PARTS
from batchkv_worker.kv.layers.cache_quirks import OrderedByUs
from batchkv_worker.kv.layers.contract import SlotLayer
from batchkv_worker.kv.layers.row_moves import RowMoves
from batchkv_worker.kv.layers.stand_ins import StandIns, replaced
from batchkv_worker.kv.schemes.packing import LayerScheme, TensorScheme
from batchkv_worker.kv.slots.changes import Relayout
from batchkv_worker.kv.slots.step_view import ColumnSpan, CommonPrefix, StepView
from batchkv_worker.kv.types import PackedKV, Parts, Pieces, Window


class AttentionSlots(OrderedByUs, SlotLayer):
    """Packed ``[slots, heads, capacity, part size]``, rows right-aligned to one write column.

    The dense keys and values that it returns are lazy: MLX computes them only if they are read. So
    ``attend`` can use the packed parts without their cost.

    MLX writes in place only into buffers that no pending operation reads; else it copies them.
    Where layers start their part of a step themselves (``Backend.starts_each_layer``), each layer
    waits for the operations that still read its buffers, so that the device always has work. If
    later layers of a model read the returned arrays without a call here, a buffer may be copied.
    """

    def __init__(
        self,
        scheme: LayerScheme,
        window: Window,
        layer: LayerAttention,
        *,
        answers: bool,
        is_read: bool = True,
    ) -> None:
        """``scheme`` is that of pieces, ``layer.scheme`` that of the buffers.

        ``answers``: the model leaves attention to ``attend``, instead of reading dense arrays. Then
        without ``is_read`` it gets stand-ins of them (``StandIns``).
        """
        self._packed = scheme
        self._scheme = layer.scheme
        self._window = window
        self._dtype = layer.dtype
        self._layer = layer
        # With a mask and without, by whether whole buffers were dequantized.
        self._ways = [(way, way.without_mask()) for way in (layer, layer.dequantized)]
        self._is_rounded = layer.is_packed or (layer.backend.keeps_shapes and scheme.is_packed)
        self._answers = answers
        self._keys: list[mx.array] = []
        self._values: list[mx.array] = []
        self._starts = layer.backend.starts_each_layer
        self._writes_rows_at_once = layer.backend.writes_rows_at_once
        self._started: list[mx.array] = []  # once computed, nothing reads the buffers any more
        self._handed: tuple[mx.array, mx.array] | None = None
        self._has_attended = False
        self._stand_ins = None if is_read or not answers else StandIns(layer)
        self._span: ColumnSpan | None = None
        self._offsets = mx.array([], mx.int32)

    # -- calls by the engine

    def begin(self, view: StepView) -> None:
        self._span = view.spans[self._window]
        self._offsets = view.offsets

    def end(self) -> None:
        self._handed = self._span = None

    def _wait(self) -> None:
        """Until the buffers may be written in place."""
        if self._started:
            mx.eval(self._started)
            self._started = []

    def settle(self) -> bool:
        if self._starts:
            mx.async_eval(self.arrays)
            self._started = self.arrays
        return self._starts

    def admit(self, slot: int, write: int, pieces: Pieces | None) -> None:
        # The whole line is written, in keys and values. A former row's columns are masked, but a
        # weight of 0 times NaN is NaN, and would stay for ever.
        self._wait()
        rows = None if pieces is None else self._take(pieces)
        for index, part in enumerate([*self._keys, *self._values]):
            if rows is None:
                part[slot] = mx.zeros(part.shape[1:], part.dtype)
                continue
            row = rows[index]
            last, low = slot + row.shape[0], write - row.shape[-2]
            # A long row begins in the first column. To write all of it twice takes as long again.
            part[slot:last, ..., (0 if low else write) :, :] = 0
            part[slot:last, ..., low:write, :] = row

    def snapshot(self, slot: int, start: int, write: int) -> Pieces:
        keys, values = (
            tuple(part[slot : slot + 1, ..., start:write, :] for part in parts)
            for parts in (self._keys, self._values)
        )
        return tuple(map(mx.contiguous, self._give(keys, values)))

    def copies(self, moves: RowMoves) -> list[mx.array]:
        at_once = self._writes_rows_at_once
        return [moves.copy(part, at_once=at_once) for part in (*self._keys, *self._values)]

    def move(self, moves: RowMoves, copies: list[mx.array]) -> None:
        self._wait()
        left = iter(copies)
        for parts in (self._keys, self._values):
            for index, part in enumerate(parts):
                parts[index] = moves.write(part, next(left), at_once=self._writes_rows_at_once)

    def as_prefix(self, pieces: Pieces) -> tuple[PackedKV, PackedKV]:
        packed = self._packed.split(pieces)
        return packed, (self._scheme.keys.take(packed[0]), self._scheme.values.take(packed[1]))

    def _take(self, pieces: Pieces) -> Pieces:
        keys, values = self._packed.split(pieces)
        return (*self._scheme.keys.take(keys), *self._scheme.values.take(values))

    def _give(self, keys: Parts, values: Parts) -> Pieces:
        """Undo ``_take`` for a row's part of the buffers."""
        return (*self._scheme.keys.give(keys), *self._scheme.values.give(values))

    def relayout(self, change: Relayout) -> None:
        self._wait()
        if not self._keys:
            self._make_buffers(change)
            return
        self._keys = [_rebuilt(part, change) for part in self._keys]
        self._values = [_rebuilt(part, change) for part in self._values]

    def drop(self) -> None:
        self._keys, self._values, self._started = [], [], []
        self.end()

    def check(self, rows: int, capacity: int) -> None:
        for part in (*self._keys, *self._values):
            assert (part.shape[0], part.shape[-2]) == (rows, capacity), part.shape
        assert self._handed is None

    @property
    def arrays(self) -> list[mx.array]:
        return [*self._keys, *self._values]

    @property
    def unread(self) -> list[mx.array]:
        # Models that attend by themselves may leave some of it, like an indexer's values.
        return [] if self._has_attended else self.arrays

    def swap(self, arrays: list[mx.array]) -> None:
        count = len(self._keys)
        self._keys, self._values = arrays[:count], arrays[count:]

    @property
    def is_exact(self) -> bool:
        return self._answers and not self._is_rounded

    def _make_buffers(self, change: Relayout) -> None:
        shape = self._scheme.shape
        self._keys = self._empty(self._scheme.keys, shape.key_size, change)
        self._values = self._empty(self._scheme.values, shape.value_size, change)

    def _empty(self, scheme: TensorScheme, size: int, change: Relayout) -> list[mx.array]:
        sample = scheme.pack(mx.zeros((1, 1, 1, size), self._dtype))
        heads = self._scheme.shape.num_heads
        return [
            mx.zeros((change.rows, heads, change.capacity, part.shape[-1]), part.dtype)
            for part in sample
        ]

    # -- calls by the model

    @property
    def offset(self) -> mx.array:
        return self._offsets

    @property
    def span(self) -> ColumnSpan:
        """The columns of the step at hand."""
        if self._span is None:
            raise ValueError("a step has to begin first")
        return self._span

    def make_mask(
        self, num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> Any:
        if num_tokens != 1:
            raise ValueError("decode slots take one token a row")
        if window_size is None or (self._window is not None and window_size >= self._window):
            return self.span.mask
        return self.span.windowed(window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write one token a row, ``[rows, heads, 1, size]``; dense views of all visible columns."""
        self._wait()
        span = self.span
        self._write(span, keys, values)
        VALUE_PARTS.clear()
        if self._stand_ins is None:
            self._handed = self._read()
        else:
            self._handed = self._stand_ins.of(span.num_rows, span.high - span.low)
        return self._handed

    def _write(self, span: ColumnSpan, keys: mx.array, values: mx.array) -> None:
        """Pack one token a row into the step's column."""
        for parts, piece in (
            (self._keys, self._scheme.keys.pack(keys)),
            (self._values, self._scheme.values.pack(values)),
        ):
            parts[:] = [span.store(part, new) for part, new in zip(parts, piece, strict=True)]

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The result of the last update, for layers without keys of their own."""
        if self._handed is None:
            raise ValueError("no keys have been computed in this step")
        return self._handed

    def dense(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """These arrays, and in the place of stand-ins what they stand for."""
        if self._stand_ins is None or self._handed is None:
            return keys, values
        return replaced(self._handed, keys, values, self._read)

    def handed_out(self, keys: Any, values: Any, mask: Any) -> bool:
        """Whether these are the result of the last update, with this step's own mask."""
        same = self._handed is not None and keys is self._handed[0] and values is self._handed[1]
        return same and mask is self.span.mask

    @property
    def attend(self) -> Attend | None:
        """The function that the hook calls instead of the model's; None on dense arrays."""
        return self._attend if self._answers else None

    def _attend(
        self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None
    ) -> mx.array:
        out = self._attention(queries, scale, sinks)
        self._has_attended = True  # over all that it keeps
        if self._starts:
            mx.async_eval(out, self.arrays)
            # Arrays that are started together are computed together. Layers without keys of their
            # own attend here, too, later.
            self._started += [out] if self._started else self.arrays
        return out

    def _attention(self, queries: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        """Attention of one token a row over what its group sees."""
        span = self.span
        together = [
            (common, self._partial(common, queries[common.first : common.last], scale))
            for common in span.common
        ]
        is_whole = self._layer.reads_whole(span.visible, span.stored)
        layer, without_mask = self._ways[is_whole]
        buffers = tuple(self._keys), tuple(self._values)
        if is_whole:  # once for all groups
            keys, values = (tuple(part[: span.num_rows] for part in parts) for parts in buffers)
            buffers = self._layer.dequantize((keys, values))
        found = []
        groups = span.groups if self._is_rounded else span.exact_groups
        for group in groups:
            cells = group.cells
            keys = tuple([part[cells] for part in buffers[0]])
            values = tuple([part[cells] for part in buffers[1]])
            of_rows = queries if len(groups) == 1 else queries[group.first : group.last]
            rest = scale, group.mask, sinks
            if group.prefix is not None:
                shared = [one.slots[self.place] for one in group.prefixes]
                if is_whole:
                    shared = [self._layer.dequantize(one) for one in shared]
                partials = [
                    partial.of(slice(group.first - common.first, group.last - common.first))
                    for common, partial in together
                    if common.has(group)
                ]
                own = keys, values
                out = shared_prefix.attend(layer, of_rows, shared, own, *rest, partials)
            else:
                way = without_mask if group.is_exact else layer
                out = paths.attend(way, of_rows, keys, values, *rest)
            found.append(out)
        return found[0] if len(found) == 1 else mx.concatenate(found, axis=0)

    def _partial(self, common: CommonPrefix, queries: mx.array, scale: float) -> PartialAttention:
        """Attention of rows of several groups over a prefix that all of them share."""
        shared = common.prefix.slots[self.place]
        return shared_prefix.attend_partial(self._layer, queries, shared, scale)

    def _read(self) -> tuple[mx.array, mx.array]:
        """All visible columns of keys and values, dense."""
        span = self.span
        cells = span.num_rows * (span.high - span.low)
        is_whole = self._layer.reads_whole(cells, span.stored)
        return (
            self._dense(self._scheme.keys, self._keys, is_whole),
            self._dense(self._scheme.values, self._values, is_whole),
        )

    def _dense(self, scheme: TensorScheme, parts: list[mx.array], is_whole: bool) -> mx.array:
        """All visible columns, dense, in the model's basis."""
        span = self.span
        rows, columns = slice(span.num_rows), slice(span.low, span.high)
        if is_whole:
            whole = scheme.unpack(tuple(part[rows] for part in parts), self._dtype)
            return whole[..., columns, :]
        return scheme.unpack(tuple(part[rows, ..., columns, :] for part in parts), self._dtype)


def _rebuilt(part: mx.array, change: Relayout) -> mx.array:
    shape = (change.rows, *part.shape[1:-2], change.capacity, part.shape[-1])
    new = mx.zeros(shape, part.dtype)
    rows = min(change.rows, part.shape[0])
    if change.high > change.low:
        low, high = change.low + change.shift, change.high + change.shift
        new[:rows, ..., low:high, :] = part[:rows, ..., change.low : change.high, :]
    return new
