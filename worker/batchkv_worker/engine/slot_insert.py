"""Which prefilled rows are copied into decode slots together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from batchkv_worker.kv.slots.changes import Demand
from batchkv_worker.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Placement:
    """A row that was given a slot and is not copied yet.

    ``place`` is its index among the rows of its group. ``shared`` of its tokens are in a shared
    prefix.
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
        """The row's columns: those of its tokens, and those that may still come."""
        return Demand(self.row.num_prefill, self.row.num_remaining, self.shared)

    def is_followed_by(self, other: Placement) -> bool:
        """Whether both can be copied at once: neighbours in group and slots, of one length.

        Parked rows cannot: choices of one row have the same arrays.
        """
        return not self.row.parked and (
            (other.place, other.slot) == (self.place + 1, self.slot + 1)
            and (self.row.num_prefill, self.shared) == (other.row.num_prefill, other.shared)
            and self.row.num_prefill > 0
        )


def runs(placed: list[Placement]) -> Iterator[list[Placement]]:
    """Runs of rows, in order of their slots, that can be copied at once."""
    run: list[Placement] = []
    for one in sorted(placed, key=lambda one: one.slot):
        if run and not run[-1].is_followed_by(one):
            yield run
            run = []
        run.append(one)
    if run:
        yield run
