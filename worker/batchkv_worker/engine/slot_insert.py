"""A prefilled row that was given a decode slot."""

from __future__ import annotations

from dataclasses import dataclass

from batchkv_worker.kv.slots.changes import Arrival, Demand
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
    def arrival(self) -> Arrival:
        """The row as the slots see it."""
        assert self.row.slot is not None
        return Arrival(self.row.slot, self.place, self.row.num_prefill, self.shared)

    @property
    def demand(self) -> Demand:
        """The row's columns: those of its tokens, and those that may still come."""
        return Demand(self.row.num_prefill, self.row.num_remaining, self.shared)
