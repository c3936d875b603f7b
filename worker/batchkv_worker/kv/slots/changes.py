"""What a layout is asked for, and what it answers. Plain Python."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Demand:
    """What a row asks for: tokens already in the cache, and tokens still to come at most.

    The first ``shared`` of them are in a shared prefix: layers that keep every token have only the
    rest.
    """

    length: int
    remaining: int
    shared: int = 0

    @property
    def own(self) -> Demand:
        """What the row asks of a layer that stores the prefix apart."""
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
