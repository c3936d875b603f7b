"""Rows that go to other slots together, and how their lines of a buffer are copied.

A line is all that a buffer has of one slot. The lines of all rows are copied first, with one
operation, and then written over the lines of their new slots. So a slot may be left and entered in
the same moves. A GPU's host takes longer to start an operation than the device takes for a line, so
there all lines are written with one operation, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import mlx.core as mx

from batchkv_worker.kv.slots.changes import Move

_WORD_BYTES = 4


class RowMoves:
    """Moves in the order in which they were chosen. No row moves twice."""

    def __init__(self, moves: Sequence[Move]) -> None:
        self._sources = [move.source for move in moves]
        self._targets = [move.target for move in moves]
        assert moves and len({*self._sources}) == len({*self._targets}) == len(moves)
        self._orders: dict[int, mx.array] = {}

    @property
    def num_slots(self) -> int:
        """The slots up to the highest of all these."""
        return 1 + max(*self._sources, *self._targets)

    def order(self, rows: int) -> mx.array:
        """Of ``rows`` slots each one's source. A slot that no row enters is its own."""
        if rows not in self._orders:
            order = [*range(rows)]
            for source, target in zip(self._sources, self._targets, strict=True):
                order[target] = source
            self._orders[rows] = mx.array(order, mx.int32)
        return self._orders[rows]

    @cached_property
    def _arrays(self) -> tuple[mx.array, mx.array]:
        """Sources and targets, the same arrays for all buffers."""
        return mx.array(self._sources, mx.int32), mx.array(self._targets, mx.int32)

    def copy(self, buffer: mx.array, *, at_once: bool) -> mx.array:
        """The lines of the rows that move, lazily. They are to be computed before ``write``."""
        if len(self._sources) == 1:
            (source,) = self._sources
            return mx.contiguous(buffer[source : source + 1])
        return mx.take(_in_words(buffer) if at_once else buffer, self._arrays[0], axis=0)

    def write(self, buffer: mx.array, lines: mx.array, *, at_once: bool) -> mx.array:
        """``buffer`` with the lines of ``copy`` in the rows' new slots, written in place.

        ``at_once``: with one operation that takes the slots' numbers.
        """
        if at_once and len(self._targets) > 1:
            words = _in_words(buffer)
            words[self._arrays[1]] = lines
            return words.view(buffer.dtype).reshape(buffer.shape)
        for place, target in enumerate(self._targets):
            buffer[target : target + 1] = lines[place : place + 1]
        return buffer


def _in_words(buffer: mx.array) -> mx.array:
    """The same bits, a line each, without a copy.

    Metal writes numbers of two bytes by comparing and exchanging whole words.
    """
    lines = buffer.reshape(buffer.shape[0], -1)
    is_whole = lines.shape[1] * lines.dtype.size % _WORD_BYTES == 0
    return lines.view(mx.uint32) if is_whole else lines
