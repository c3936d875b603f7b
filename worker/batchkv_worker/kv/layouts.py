"""The layouts of a model's decode slots: one for whole histories, one for each sliding window.

They move in lockstep: a row has the same slot in all of them, and only its columns differ. Plain
Python, like the layouts themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING

from batchkv_worker.kv.layout import Demand, Relayout, SlotLayout

if TYPE_CHECKING:
    from batchkv_worker.kv.stem import Stem

Window = int | None  # None: a layer that keeps every token
Changes = dict[Window, Relayout]


@dataclass(frozen=True, slots=True)
class Costs:
    """Bytes of a model's caches under a scheme.

    ``per_token``: of all layers that keep every token; ``per_window``: bytes a token of the layers
    with a window, by window; ``per_row``: of what has no time axis; ``beside_stem``: what a token
    of a stem takes beside ``per_token``, where prefill reads it in another form than slots do.
    """

    per_token: int
    per_window: dict[int, int] = field(default_factory=dict)
    per_row: int = 0
    beside_stem: int = 0

    @property
    def per_new_token(self) -> int:
        """Bytes that a token takes while it is in every window."""
        return self.per_token + sum(self.per_window.values())

    def prefill(self, demand: Demand, margin: int) -> int:
        """Bytes of a row's prompt in prefill, ``margin`` tokens beside a window."""
        length = demand.length
        windows = sum(
            size * min(length, window + margin) for window, size in self.per_window.items()
        )
        return demand.own.length * self.per_token + windows + self.per_row


@dataclass(frozen=True, slots=True)
class Move:
    """A row goes from one slot to another, which is free."""

    source: int
    target: int


class SlotLayouts:
    """Slots, and their columns in every layout."""

    def __init__(self, num_slots: int, windows: Iterable[int] = ()) -> None:
        self.main = SlotLayout(num_slots)
        self.all: dict[Window, SlotLayout] = {None: self.main}
        self.all.update({window: SlotLayout(num_slots, window) for window in sorted(set(windows))})
        self.stems: dict[int, Stem] = {}  # by slot

    @property
    def num_slots(self) -> int:
        return self.main.num_slots

    @property
    def num_active(self) -> int:
        return self.main.num_active

    @property
    def num_free(self) -> int:
        return self.main.num_free

    def bytes_needed(self, costs: Costs, extra: list[Demand]) -> int:
        """Bytes that the slots would grow to with ``extra`` rows admitted, who share a stem if any.

        The stem counts although it may be there already.
        """
        stems = {stem.key: stem.num_tokens for stem in self.stems.values()}
        shared = sum(stems.values()) + max((demand.shared for demand in extra), default=0)
        needed = self.main.cells_needed([demand.own for demand in extra]) * costs.per_token
        needed += shared * (costs.per_token + costs.beside_stem)
        # States stand in every row up to the highest slot, whether anybody is in it or not.
        rows = self.main.rows_for(self.num_active + len(extra))
        needed += max(self.main.num_rows, rows) * costs.per_row
        for window, size in costs.per_window.items():
            layout = self.all.get(window) or SlotLayout(self.num_slots, window)
            needed += layout.cells_needed(extra) * size
        return needed

    def drop(self) -> None:
        """With nobody in: the next row starts with buffers of its own size."""
        for layout in self.all.values():
            layout.drop()

    def make_way(self, demand: Demand, stem: Stem | None = None) -> tuple[int, Move | None]:
        """Choose a slot; the row that stood there, if any, has moved in the layouts.

        Raises ValueError when no slot is free.
        """
        ranks = {slot: other.rank for slot, other in self.stems.items()}
        rank = 0 if stem is None else stem.rank
        slot, free = self.main.choose(demand.own.length, rank, ranks)
        if free is None:
            return slot, None
        move = Move(slot, free)
        self._move(move)
        return slot, move

    def admit(self, demand: Demand, slot: int, stem: Stem | None = None) -> Changes:
        """Give a row the free slot ``slot``; all buffers then have equally many rows."""
        if demand.shared != (0 if stem is None else stem.num_tokens):
            raise ValueError(f"a row that shares {demand.shared} tokens does not fit its stem")
        found: dict[Window, Relayout | None] = {None: self.main.admit(demand.own, slot)[1]}
        if stem is not None:
            self.stems[slot] = stem
        for window, layout in self.all.items():
            if window is not None:
                found[window] = layout.admit(demand, slot, self.main.rows)[1]
        return {window: change for window, change in found.items() if change is not None}

    def _move(self, move: Move) -> None:
        for layout in self.all.values():
            layout.move(move.source, move.target)
        if (stem := self.stems.pop(move.source, None)) is not None:
            self.stems[move.target] = stem

    def before_step(self) -> Changes:
        """Make sure that every write column exists."""
        found = {window: layout.before_step() for window, layout in self.all.items()}
        return {window: change for window, change in found.items() if change is not None}

    def after_step(self) -> None:
        """Every row has written its columns."""
        for layout in self.all.values():
            layout.after_step()

    def release(self, slot: int) -> None:
        """Take a row's slot back."""
        for layout in self.all.values():
            layout.release(slot)
        self.stems.pop(slot, None)

    def size(self, slot: int) -> int:
        """Tokens of a row, its stem's among them."""
        stem = self.stems.get(slot)
        return self.main.length(slot) + (0 if stem is None else stem.num_tokens)

    def close_gap(self) -> Move | None:
        """Move a row into the lowest free slot below it; None when there is none.

        The last of the next rows that share a stem, or have none: so stems stay together, and the
        gap goes up until it is gone.
        """
        gap = self.main.gap()
        if gap is None:
            return None
        above = sorted(slot for slot in self.main.slots if slot > gap[1])
        stem = self.stems.get(above[0])
        run = takewhile(lambda slot: self.stems.get(slot) is stem, above)
        move = Move(max(run), gap[1])
        self._move(move)
        return move

    def check(self) -> None:
        """Raise AssertionError when the books do not balance."""
        for layout in self.all.values():
            layout.check()
            assert (layout.slots, layout.rows) == (self.main.slots, self.main.rows)
        assert self.stems.keys() <= self.main.slots
