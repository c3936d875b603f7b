"""Stores the arrays of many layers as a few large ones, because arrays have a limit on Metal."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from batchkv_worker.kv.types import Pieces


class Bundle:
    """One row's pieces of all layers, copied out; arrays of one shape and dtype are stacked.

    A Metal process can hold half a million arrays at most, and a block of many layers has hundreds.
    """

    def __init__(self, layers: Sequence[Pieces | None]) -> None:
        alike: dict[tuple[tuple[int, ...], mx.Dtype], list[mx.array]] = {}
        self._places: list[list[tuple[int, int]] | None] = []
        for pieces in layers:
            if pieces is None:
                self._places.append(None)
                continue
            places = []
            for array in pieces:
                stack = alike.setdefault((tuple(array.shape), array.dtype), [])
                places.append((list(alike).index((tuple(array.shape), array.dtype)), len(stack)))
                stack.append(array)
            self._places.append(places)
        # A single array is a view of a larger one, and stacking it alone would copy nothing.
        self.arrays = [
            mx.stack(stack) if len(stack) > 1 else mx.contiguous(stack[0])[None]
            for stack in alike.values()
        ]

    def layer(self, index: int) -> Pieces | None:
        """The pieces of one layer."""
        places = self._places[index]
        return None if places is None else tuple(self.arrays[a][i] for a, i in places)

    def with_arrays(self, arrays: Sequence[mx.array]) -> Bundle:
        """The same pieces of the same layers, in other arrays of the same shapes."""
        other = Bundle([])
        other._places, other.arrays = self._places, list(arrays)
        return other

    @property
    def nbytes(self) -> int:
        return sum(int(array.nbytes) for array in self.arrays)
