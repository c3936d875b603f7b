"""Which row owns which columns of the decode slots. Plain Python: no tensors here.

Every layer keeps one buffer ``[slots, heads, capacity, size]``. All rows write the same column,
so a row's tokens are right-aligned against it::

    column   0 ....... lowest ............ write ......... capacity
    slot 0             [a a a a a a a a a a)
    slot 1                      [b b b b b b)
    slot 2   (free: its numbers are masked)

A step writes column ``write`` of every row and moves ``write`` on by one. A row that ends gives
its slot back, which costs nothing. Columns left of ``lowest`` belong to no row. They are used again
when the buffer shifts left (amortized: only when a quarter of it is free). If a new row is longer
than ``write``, the others shift right.

A layer with a sliding window keeps the same buffer cut to its window. A row then owns its last
``window - 1`` columns at most, and the columns left of them are free. The buffer never grows beyond
the window and a step.
"""

from __future__ import annotations

from collections.abc import Mapping

from batchkv_worker.kv.slots import growth
from batchkv_worker.kv.slots.changes import Demand, Relayout
from batchkv_worker.kv.slots.growth import STEP, round_up
from batchkv_worker.kv.slots.slot_choice import Ranks, placement_cost


class SlotLayout:
    """Slots, columns and their growth; the tensors are changed as this decides."""

    def __init__(self, num_slots: int, window: int | None = None) -> None:
        self.num_slots = num_slots
        self.window = window
        self.version = 0  # changes whenever a row enters, leaves or moves
        self.rows = 0  # rows that the buffers have; more slots are added when needed
        self.capacity = 0
        self.write = 0
        self._starts: dict[int, int] = {}
        self._ends: dict[int, int] = {}  # the column at which a row must have ended

    @property
    def num_active(self) -> int:
        return len(self._starts)

    @property
    def num_free(self) -> int:
        return self.num_slots - len(self._starts)

    @property
    def num_rows(self) -> int:
        """Rows that a step computes: up to the highest slot in use."""
        return max(self._starts, default=-1) + 1

    @property
    def lowest(self) -> int:
        """The first column that any row owns."""
        return max(min(self._starts.values(), default=self.write), self._horizon)

    @property
    def _horizon(self) -> int:
        """The first column that the next token can see."""
        return 0 if self.window is None else max(0, self.write - self.window + 1)

    def start(self, slot: int) -> int:
        """First column of a row; for a free slot the write column: it owns nothing."""
        return max(self._starts.get(slot, self.write), self._horizon)

    def length(self, slot: int) -> int:
        """Columns that a row owns."""
        return self.write - self.start(slot)

    def kept(self, length: int) -> int:
        """How many of a row's ``length`` tokens the buffer keeps: its last ones."""
        return length if self.window is None else min(length, self.window - 1)

    @property
    def ceiling(self) -> int | None:
        """The most columns that a windowed buffer has."""
        return None if self.window is None else round_up(self.window) + STEP

    @property
    def last_end(self) -> int:
        """The column at which the last of the rows must have ended."""
        return max(self._ends.values(), default=self.write)

    @property
    def num_remaining(self) -> int:
        """Tokens that the rows in slots may still generate."""
        return sum(self._ends.values()) - self.write * len(self._ends)

    def cells_needed(self, extra: list[Demand], ahead: int | None = None) -> int:
        """Rows times columns that the buffers would grow to with ``extra`` rows admitted.

        At most ``ahead`` tokens to come count for each row; None: all that may still come.
        """
        lengths = [self.length(slot) for slot in self._starts]
        lengths += [self.kept(demand.length) for demand in extra]
        remaining = [end - self.write for end in self._ends.values()]
        remaining += [demand.remaining for demand in extra]
        coming = max(remaining, default=0)
        columns = round_up(
            max(lengths, default=0) + (coming if ahead is None else min(coming, ahead))
        )
        if self.ceiling is not None:  # windows have no limit of cells: they may be a step ahead
            columns = min(columns + STEP, self.ceiling)
        count = self.rows_for(self.num_active + len(extra))
        if not self._starts and not self._keeps_for(extra):
            return count * columns
        if self.window is None and self._starts:  # with a limit, these grow by no more than needed
            return max(self.num_rows, count) * columns
        return max(self.rows, count) * max(self.capacity, columns)

    def _is_kept(self, columns: int) -> bool:
        """Whether buffers without rows stay as they are for a row that needs ``columns``."""
        return columns <= self.capacity <= 4 * columns

    def _keeps_for(self, extra: list[Demand]) -> bool:
        """Whether the buffers would stay for one of these rows if it came first."""
        kept = (round_up(self.kept(demand.length) + demand.remaining) for demand in extra)
        return any(map(self._is_kept, kept))

    def drop(self) -> None:
        """If no row is in a slot, the next row starts with buffers of its own size."""
        assert not self._starts
        self.rows = self.capacity = self.write = 0

    def rows_for(self, count: int) -> int:
        """Rows are added by doubling."""
        return min(self.num_slots, 1 << max(0, count - 1).bit_length())

    def choose(
        self, length: int | None, new_ranks: Ranks = (), ranks: Mapping[int, Ranks] | None = None
    ) -> tuple[int, int | None]:
        """A slot for a row of ``length`` columns, and the free slot to move its present row to.

        Attention reads groups of neighbouring rows, each from the group's first column on, so rows
        of similar length should be neighbours. A free slot may be used, or the row in a slot may
        move to a free one. The choice that adds least to the differences between neighbours wins. A
        move must save more than it copies. The second value is None when no row has to move. Rows
        with the same shared prefixes are attended together, so these count more than lengths:
        ``ranks`` has the ranks of their prefixes, by slot; ``new_ranks`` are the new row's. With
        ``length`` None lengths do not count.
        """
        if not self.num_free:
            raise ValueError("no slot is free")
        rows = min(self.num_slots, max(1, self.rows_for(self.num_active + 1)))
        ranks = ranks or {}
        lines = [
            (ranks.get(slot, ()), 0 if length is None else self.length(slot))
            if slot in self._starts
            else None
            for slot in range(rows)
        ]
        new = new_ranks, length or 0
        used = [slot for slot, line in enumerate(lines) if line is not None]
        free = min(
            (slot for slot, line in enumerate(lines) if line is None),
            key=lambda slot: placement_cost(lines, slot, new),
        )
        best: tuple[int, int | None] = free, None
        least = placement_cost(lines, free, new)
        if least <= STEP or free >= self.rows:
            return best
        for slot in used:
            moved = lines[slot]
            assert moved is not None
            without = [*lines[:slot], None, *lines[slot + 1 :]]
            strain = placement_cost(without, free, moved) - placement_cost(without, slot, moved)
            strain += placement_cost(without, slot, new) + moved[1]
            if strain < least:
                best, least = (slot, free), strain
        return best

    def admit(
        self,
        demand: Demand,
        slot: int | None = None,
        rows: int | None = None,
        max_cells: int | None = None,
    ) -> tuple[int, Relayout | None]:
        """Give a row a slot; its tokens belong at ``[start(slot), write)`` after the relayout.

        ``rows`` is how many rows the buffers must have, None leaves it to the layout. Raises
        ValueError when no slot is free, or the wanted one is not; NoRoom when rows times columns
        would exceed ``max_cells``. A row that is alone always gets its room.
        """
        length = self.kept(demand.length)
        if slot is None:
            slot = next(i for i in range(self.num_slots + 1) if i not in self._starts)
        if not self.num_free:
            raise ValueError("no slot is free")
        if slot in self._starts:
            raise ValueError(f"slot {slot} is not free")
        kept = Demand(length, demand.remaining)
        if self._starts:
            change = self._move(growth.before_join(self, kept, slot, rows, max_cells))
        else:
            change = self._start_afresh(kept, slot, rows)
        self._starts[slot] = self.write - length
        self._ends[slot] = self.write + demand.remaining
        self.version += 1
        return slot, change

    def _start_afresh(self, demand: Demand, slot: int, wanted_rows: int | None) -> Relayout | None:
        """For the first row: new buffers, unless those that exist fit."""
        self.write = demand.length
        fits = self.rows > slot if wanted_rows is None else self.rows == wanted_rows
        if fits and self._is_kept(round_up(demand.length + demand.remaining)):
            return None
        wanted = round_up(demand.length + min(demand.remaining, STEP))
        return self._move(Relayout(0, 0, 0, wanted_rows or self.rows_for(slot + 1), wanted))

    def before_step(self, max_cells: int | None = None) -> Relayout | None:
        """Make sure that the write column exists; raises NoRoom."""
        return self._move(growth.before_step(self, max_cells))

    def shrink(self, *, is_tight: bool = False) -> Relayout | None:
        """Drop the rows above the highest slot in use.

        ``is_tight``: also the columns that no row owns, except those of the next step.
        """
        shift = -self.lowest if is_tight else 0
        capacity = round_up(self.write + shift + 1) if is_tight else self.capacity
        return self._move(self.rebuilt(self.num_rows, min(capacity, self.capacity), shift))

    def rebuilt(self, rows: int, capacity: int, shift: int) -> Relayout:
        """New buffers that keep every column that a row owns."""
        return Relayout(self.lowest, self.write, shift, rows, capacity)

    def _move(self, change: Relayout | None) -> Relayout | None:
        if change is None:
            return None
        before = (self.rows, self.capacity)
        self.write += change.shift
        self._starts = {slot: start + change.shift for slot, start in self._starts.items()}
        self._ends = {slot: end + change.shift for slot, end in self._ends.items()}
        self.rows, self.capacity = change.rows, change.capacity
        unchanged = change.shift == 0 and before == (change.rows, change.capacity)
        return None if unchanged else change

    def after_step(self) -> None:
        """Every row has written its column."""
        self.write += 1

    def release(self, slot: int) -> None:
        """Take a row's slot back."""
        del self._starts[slot], self._ends[slot]
        self.version += 1

    @property
    def slots(self) -> set[int]:
        """The slots in use."""
        return set(self._starts)

    def gap(self) -> tuple[int, int] | None:
        """The highest row and the lowest free slot below it; None when rows are dense."""
        highest = self.num_rows - 1
        free = next((i for i in range(highest) if i not in self._starts), None)
        return None if free is None else (highest, free)

    def move(self, source: int, target: int) -> None:
        """Give the row in ``source`` the free slot ``target``."""
        self._starts[target] = self._starts.pop(source)
        self._ends[target] = self._ends.pop(source)
        self.version += 1

    def check(self) -> None:
        """Raise AssertionError if the layout contradicts itself."""
        assert self.num_free + self.num_active == self.num_slots
        assert self._starts.keys() == self._ends.keys()
        assert all(0 <= self.start(slot) <= self.write for slot in self._starts)
        assert all(0 <= slot < self.num_slots for slot in self._starts)
        assert self.write <= self.capacity
        assert self.num_rows <= self.rows <= self.num_slots or not self._starts
