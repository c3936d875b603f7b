"""Rows whose prompts are computed move into decode slots, several with one copy where they can."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from batchkv_worker.kv.slots.changes import Demand
from batchkv_worker.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Placed:
    """A row that has a slot and is not there yet.

    ``place`` is its own among the rows of its group, ``shared`` how many of its tokens stand in a
    stem.
    """

    row: Sequence
    place: int
    shared: int

    @property
    def slot(self) -> int:
        assert self.row.slot is not None
        return self.row.slot

    @property
    def demand(self) -> Demand:
        """What the row asks of the slots."""
        return Demand(self.row.num_prefill, self.row.num_remaining, self.shared)

    def is_followed_by(self, other: Placed) -> bool:
        """Whether the other can be copied with it: next in the group, in the slots, and as long."""
        return (
            (other.place, other.slot) == (self.place + 1, self.slot + 1)
            and (self.row.num_prefill, self.shared) == (other.row.num_prefill, other.shared)
            and self.row.num_prefill > 0
        )


def runs(placed: list[Placed]) -> Iterator[list[Placed]]:
    """The rows of a group by slot, cut where one cannot be copied with the one before it."""
    run: list[Placed] = []
    for one in sorted(placed, key=lambda one: one.slot):
        if run and not run[-1].is_followed_by(one):
            yield run
            run = []
        run.append(one)
    if run:
        yield run
