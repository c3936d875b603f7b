"""The demand of a row on a layout, the changes by which the layout meets it, and rows that arrive.

Plain Python.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from batchkv_worker.kv.types import Window


@dataclass(frozen=True, slots=True)
class Demand:
    """A row's demand: its tokens in the cache, and the most tokens that may still come.

    The first ``shared`` of them are in a shared prefix: layers that keep every token have only the
    rest.
    """

    length: int
    remaining: int
    shared: int = 0

    @property
    def own(self) -> Demand:
        """The row's demand on a layer that stores the shared prefix separately."""
        return Demand(self.length - self.shared, self.remaining)


@dataclass(frozen=True, slots=True)
class Relayout:
    """Old columns [low, high) go to [low + shift, high + shift) of a new buffer.

    It has ``rows`` rows (old rows keep their numbers) and is ``capacity`` columns wide.
    """

    low: int
    high: int
    shift: int
    rows: int
    capacity: int


@dataclass(frozen=True, slots=True)
class Move:
    """A row goes from one slot to another, which is free."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """A row that was given a slot and is not copied yet.

    ``place`` is its number in its group. It has ``length`` tokens, and the first ``shared`` of them
    are in a shared prefix.
    """

    slot: int
    place: int
    length: int
    shared: int = 0

    def is_followed_by(self, other: Arrival) -> bool:
        """Whether both can be copied at once: neighbours in group and slots, of one length."""
        follower = Arrival(self.slot + 1, self.place + 1, self.length, self.shared)
        return self.length > 0 and other == follower


class Arrivals:
    """Rows of one group that come into slots together, in order of their slots."""

    def __init__(self, rows: Sequence[Arrival]) -> None:
        self.rows = sorted(rows, key=lambda row: row.slot)
        self._places: dict[tuple[int, Window, int], tuple[tuple[int, ...], ...]] = {}

    @property
    def slots(self) -> tuple[int, ...]:
        """Their slots, ascending."""
        return tuple(row.slot for row in self.rows)

    def places(self, write: int, window: Window, first: int) -> tuple[tuple[int, ...], ...]:
        """Of each row four numbers, as ``RecordKernels.place_rows`` reads them.

        They are its number in the group, the first of its columns, the one after its last, and what
        is added to a column for its token's place in the group's arrays. Those begin with token
        ``first``. Rows end before column ``write``, and keep the tokens of ``window``.
        """
        key = write, window, first
        if key not in self._places:
            own = [
                row.length - row.shared if window is None else min(row.length, window - 1)
                for row in self.rows
            ]
            self._places[key] = tuple(
                (row.place, write - kept, write, row.length - write - first)
                for row, kept in zip(self.rows, own, strict=True)
            )
        return self._places[key]

    def runs(self) -> Iterator[tuple[Arrival, int]]:
        """The first row and the number of those that can be copied at once."""
        first = 0
        for place, row in enumerate(self.rows, start=1):
            if place == len(self.rows) or not row.is_followed_by(self.rows[place]):
                yield self.rows[first], place - first
                first = place
