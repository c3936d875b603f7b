"""A layer that keeps a state instead of tokens: recurrent and convolution layers.

The arrays of a state have a batch axis and no time axis. The model replaces the arrays, so nothing
is written in place. A new row replaces its line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from batchkv_worker.kv.layers.contract import Chunk, LayerKind, PrefillLayer, SlotLayer
from batchkv_worker.kv.layers.row_moves import RowMoves
from batchkv_worker.kv.slots.changes import Relayout
from batchkv_worker.kv.slots.step_view import StepView
from batchkv_worker.kv.types import Pieces, Window


@dataclass(frozen=True, slots=True)
class StateShape:
    """Shapes of a layer's arrays without their batch axis, and their dtypes.

    None is an array that the model never stores.
    """

    shapes: tuple[tuple[int, ...] | None, ...]
    dtypes: tuple[mx.Dtype | None, ...]

    @property
    def used(self) -> list[tuple[int, tuple[int, ...], mx.Dtype]]:
        """(place, shape, dtype) of each array that exists."""
        both = enumerate(zip(self.shapes, self.dtypes, strict=True))
        return [(i, shape, kind) for i, (shape, kind) in both if shape is not None and kind]

    @property
    def nbytes(self) -> int:
        """Bytes of one row."""
        total = 0
        for _, shape, dtype in self.used:
            size = dtype.size
            for extent in shape:
                size *= extent
            total += size
        return total


class _Arrays:
    """The cache for models: a list of arrays, ``lengths`` of rows in the chunk, ``advance``."""

    def __init__(self, count: int) -> None:
        self.cache: list[mx.array | None] = [None] * count
        self.lengths: mx.array | None = None
        self.left_padding: mx.array | None = None

    def __getitem__(self, index: int) -> mx.array | None:
        return self.cache[index]

    def __setitem__(self, index: int, value: mx.array | None) -> None:
        self.cache[index] = value

    def advance(self, num_tokens: int) -> None:
        """Does nothing: ``lengths`` are of one chunk, and are set again for the next."""

    def make_mask(self, num_tokens: int, **_: Any) -> mx.array | None:
        """bool ``[rows, tokens]``: which of the chunk's tokens are real; None if all are."""
        if self.lengths is None:
            return None
        return mx.arange(num_tokens) < self.lengths[:, None]


class StatePrefill(_Arrays, PrefillLayer):
    """States of rows whose prompts are computed, ``[rows, ...]`` each."""

    def __init__(self, shape: StateShape) -> None:
        super().__init__(len(shape.shapes))
        self._shape = shape

    def begin(self, chunk: Chunk) -> None:
        self.lengths = None if chunk.lengths is None else mx.array(chunk.lengths)

    def end(self) -> None:
        self.lengths = None

    def restore(self, pieces: Pieces, first: int, end: int) -> None:
        for (place, _, _), piece in zip(self._shape.used, pieces, strict=True):
            self.cache[place] = piece

    def row(self, index: int, length: int, prefix_tokens: int = 0, count: int = 1) -> Pieces:
        return self.state(index, count)

    def state(self, index: int, count: int = 1) -> Pieces:
        """Copies of one row's arrays, or of ``count`` rows', as they are after the last chunk.

        Copies, because models store slices of large temporaries, which a view would keep alive.
        """
        return tuple(mx.contiguous(array[index : index + count]) for array in self.arrays)

    def block(self, index: int, start: int, end: int, count: int = 1) -> Pieces | None:
        return None

    @property
    def arrays(self) -> list[mx.array]:
        found = [self.cache[place] for place, _, _ in self._shape.used]
        return [array for array in found if array is not None]


class StateSlots(_Arrays, SlotLayer):
    """States of the rows that decode, ``[rows, ...]`` each; rows grow and shrink with the steps."""

    def __init__(self, shape: StateShape) -> None:
        super().__init__(len(shape.shapes))
        self._shape = shape
        for place, row, dtype in shape.used:
            self.cache[place] = mx.zeros((0, *row), dtype)

    def begin(self, view: StepView) -> None:
        self._fit(view.num_rows)

    def end(self) -> None:
        """Does nothing, because nothing belongs to a step only."""

    def admit(self, slot: int, write: int, pieces: Pieces | None) -> None:
        count = pieces[0].shape[0] if pieces else 1
        self._fit(max(slot + count, self._rows))
        for index, (place, row, dtype) in enumerate(self._shape.used):
            piece = mx.zeros((1, *row), dtype) if pieces is None else pieces[index].astype(dtype)
            self._replace(place, slot, piece)

    def snapshot(self, slot: int, start: int, write: int) -> Pieces:
        return tuple(mx.contiguous(array[slot : slot + 1]) for array in self.arrays)

    def copies(self, moves: RowMoves) -> list[mx.array]:
        return []

    def move(self, moves: RowMoves, copies: list[mx.array]) -> None:
        # New arrays: the model replaces them at the next step anyway.
        self._fit(max(self._rows, moves.num_slots))
        self.swap([mx.take(array, moves.order(self._rows), axis=0) for array in self.arrays])

    def relayout(self, change: Relayout) -> None:
        """Does nothing: there are no columns, and the rows are those of the steps."""

    def drop(self) -> None:
        for place, row, dtype in self._shape.used:  # new ones: the old may never be computed
            self.cache[place] = mx.zeros((0, *row), dtype)

    def check(self, rows: int, capacity: int) -> None:
        for array, (_, shape, dtype) in zip(self.arrays, self._shape.used, strict=True):
            assert array.shape[0] <= rows, array.shape
            assert (array.shape[1:], array.dtype) == (shape, dtype), (array.shape, array.dtype)

    @property
    def arrays(self) -> list[mx.array]:
        found = [self.cache[place] for place, _, _ in self._shape.used]
        return [array for array in found if array is not None]

    def swap(self, arrays: list[mx.array]) -> None:
        places = [place for place, _, _ in self._shape.used if self.cache[place] is not None]
        for place, array in zip(places, arrays, strict=True):
            self.cache[place] = array

    @property
    def _rows(self) -> int:
        return max((array.shape[0] for array in self.arrays), default=0)

    def _fit(self, rows: int) -> None:
        """Drop rows beyond the layout's, and add missing ones as zeros."""
        for place, row, dtype in self._shape.used:
            array = self.cache[place]
            assert array is not None
            if array.shape[0] > rows:
                self.cache[place] = array[:rows]
            elif array.shape[0] < rows:
                rest = mx.zeros((rows - array.shape[0], *row), dtype)
                self.cache[place] = mx.concatenate([array, rest], axis=0)

    def _replace(self, place: int, slot: int, piece: mx.array) -> None:
        array = self.cache[place]
        assert array is not None
        self.cache[place] = mx.concatenate(
            [array[:slot], piece, array[slot + piece.shape[0] :]], axis=0
        )


@dataclass(frozen=True, slots=True)
class StateKind(LayerKind):
    """A layer with a state; it is kept as the model computes it, in the model's own precision."""

    shape: StateShape

    @property
    def window(self) -> Window:
        return None

    @property
    def has_state(self) -> bool:
        return True

    @property
    def bytes_per_token(self) -> int:
        return 0

    @property
    def bytes_per_row(self) -> int:
        return self.shape.nbytes

    def prefill(self, capacity: int, chunk_tokens: int) -> StatePrefill:
        return StatePrefill(self.shape)

    def template(self, num_tokens: int) -> Pieces:
        return tuple(mx.zeros((1, *row), dtype) for _, row, dtype in self.shape.used)

    def slots(self) -> StateSlots:
        return StateSlots(self.shape)

    def __str__(self) -> str:
        return "state"
