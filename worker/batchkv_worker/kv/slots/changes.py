"""The demand of a row on a layout, and the changes by which the layout meets it. Plain Python."""

from __future__ import annotations

from dataclasses import dataclass


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
