"""Who owns which columns of the decode slots. Plain Python: no tensors here.

Every layer keeps one buffer ``[slots, heads, capacity, size]``. All rows write the same column,
so a row's tokens are right-aligned against it::

    column   0 ....... lowest ............ write ......... capacity
    slot 0             [a a a a a a a a a a)
    slot 1                      [b b b b b b)
    slot 2   (free: whatever stands there is masked)

A step writes column ``write`` of every row and moves ``write`` on by one. A row that ends gives
its slot back and costs nothing. Columns left of ``lowest`` belong to nobody; they are used again
when the buffer shifts left (amortized: only when a quarter of it is free), and when a new row is
longer than ``write`` the others shift right.

A layer with a sliding window keeps the same buffer cut to its window: a row then owns its last
``window - 1`` columns at most, whatever stands left of them is free, and the buffer never grows
beyond the window and a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

STEP = 256  # capacities are multiples of this
_APART = 1 << 32  # what rows of different rank differ by: more than any row has tokens
_Line = tuple[int, int]  # a row's rank and length


def round_up(value: int, step: int = STEP) -> int:
    """The smallest multiple of ``step`` that holds ``value``."""
    return -(-value // step) * step


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
class Demand:
    """What a row asks for: tokens already in the cache, and tokens still to come at most.

    The first ``shared`` of them stand in a stem: layers that keep every token have only the rest.
    """

    length: int
    remaining: int
    shared: int = 0

    @property
    def own(self) -> Demand:
        """What the row asks of a layer that has the stem beside it."""
        return Demand(self.length - self.shared, self.remaining)


class SlotLayout:
    """Slots, columns and their growth; the tensors follow what this decides."""

    def __init__(self, num_slots: int, window: int | None = None) -> None:
        self.num_slots = num_slots
        self.window = window
        self.version = 0  # changes whenever a row comes, goes or moves
        self.rows = 0  # rows that the buffers have; slots beyond are added when needed
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
    def _ceiling(self) -> int | None:
        """Columns that a windowed buffer never grows beyond."""
        return None if self.window is None else round_up(self.window) + STEP

    def cells_needed(self, extra: list[Demand]) -> int:
        """Rows times columns that the buffers would grow to with ``extra`` rows admitted."""
        lengths = [self.length(slot) for slot in self._starts]
        lengths += [self.kept(demand.length) for demand in extra]
        remaining = [end - self.write for end in self._ends.values()]
        remaining += [demand.remaining for demand in extra]
        columns = round_up(max(lengths, default=0) + max(remaining, default=0))
        if self._ceiling is not None:
            columns = min(columns, self._ceiling)
        if not self._starts and not self._keeps_for(extra):
            return self.rows_for(len(extra)) * columns
        rows = max(self.rows, self.rows_for(self.num_active + len(extra)))
        return rows * max(self.capacity, columns)

    def _is_kept(self, columns: int) -> bool:
        """Whether buffers that nobody is in stay as they are for a row that needs ``columns``."""
        return columns <= self.capacity <= 4 * columns

    def _keeps_for(self, extra: list[Demand]) -> bool:
        """Whether any of the rows would keep the buffers, did it come first."""
        kept = (round_up(self.kept(demand.length) + demand.remaining) for demand in extra)
        return any(map(self._is_kept, kept))

    def drop(self) -> None:
        """With nobody in: the next row starts with buffers of its own size."""
        assert not self._starts
        self.rows = self.capacity = self.write = 0

    def rows_for(self, count: int) -> int:
        """Rows are added by doubling."""
        return min(self.num_slots, 1 << max(0, count - 1).bit_length())

    def choose(
        self, length: int, rank: int = 0, ranks: Mapping[int, int] | None = None
    ) -> tuple[int, int | None]:
        """A slot for a row of ``length`` columns, and the free slot to move its present row to.

        Attention reads groups of neighbouring rows, each from the group's first column on, so rows
        of like length belong side by side. Of all slots, taking a free one or moving one row out
        of the way, the one that adds least to the differences between neighbours is chosen; a
        move must save what it copies. The second value is None when no row has to move. Rows of one
        rank (by slot; the new row's is ``rank``) are attended together, so they come before all.
        """
        if not self.num_free:
            raise ValueError("no slot is free")
        rows = min(self.num_slots, max(1, self.rows_for(self.num_active + 1)))
        ranks = ranks or {}
        lines = [
            (ranks.get(slot, 0), self.length(slot)) if slot in self._starts else None
            for slot in range(rows)
        ]
        new = rank, length
        used = [slot for slot, line in enumerate(lines) if line is not None]
        free = min(
            (slot for slot, line in enumerate(lines) if line is None),
            key=lambda slot: _strain(lines, slot, new),
        )
        best: tuple[int, int | None] = free, None
        least = _strain(lines, free, new)
        if least <= STEP or free >= self.rows:
            return best
        for slot in used:
            moved = lines[slot]
            assert moved is not None
            without = [*lines[:slot], None, *lines[slot + 1 :]]
            strain = _strain(without, free, moved) - _strain(without, slot, moved)
            strain += _strain(without, slot, new) + moved[1]
            if strain < least:
                best, least = (slot, free), strain
        return best

    def admit(
        self, demand: Demand, slot: int | None = None, rows: int | None = None
    ) -> tuple[int, Relayout | None]:
        """Give a row a slot; its tokens belong at ``[start(slot), write)`` after the relayout.

        ``rows`` is how many rows the buffers must have, None leaves it to the layout. Raises
        ValueError when no slot is free, or the wanted one is not.
        """
        length = self.kept(demand.length)
        if slot is None:
            slot = next(i for i in range(self.num_slots + 1) if i not in self._starts)
        if not self.num_free:
            raise ValueError("no slot is free")
        if slot in self._starts:
            raise ValueError(f"slot {slot} is not free")
        change = self._make_room(Demand(length, demand.remaining), slot, rows)
        self._starts[slot] = self.write - length
        self._ends[slot] = self.write + demand.remaining
        self.version += 1
        return slot, change

    def _make_room(self, demand: Demand, slot: int, wanted_rows: int | None) -> Relayout | None:
        """Columns for a new row's tokens and at least one step after them; a row for its slot."""
        if not self._starts:  # nobody's tokens to keep: start afresh, unless the buffers fit
            self.write = demand.length
            fits = self.rows > slot if wanted_rows is None else self.rows == wanted_rows
            if fits and self._is_kept(round_up(demand.length + demand.remaining)):
                return None
            wanted = round_up(demand.length + min(demand.remaining, STEP))
            return self._move(Relayout(0, 0, 0, wanted_rows or self.rows_for(slot + 1), wanted))
        rows = wanted_rows or max(self.rows, self.rows_for(slot + 1))
        shift = max(0, demand.length - self.write)
        capacity = max(self.capacity, round_up(self.write + shift + 1))
        low = self.lowest
        if low >= STEP and capacity > self.capacity:  # rather than grow, drop what nobody owns
            shift = max(demand.length - self.write, -low)
            capacity = max(self.capacity, round_up(self.write + shift + 1))
        return self._move(Relayout(low, self.write, shift, rows, capacity))

    def before_step(self) -> Relayout | None:
        """Make sure that the write column exists."""
        if self.write < self.capacity:
            return None
        low, last = self.lowest, max(self._ends.values(), default=self.write)
        enough = self.window is not None or low >= self.capacity // 4
        if low >= STEP and (enough or last - low <= self.capacity):
            return self._move(Relayout(low, self.write, -low, self.rows, self.capacity))
        wanted = round_up(min(self.capacity * 3 // 2, last))
        if self._ceiling is not None:
            wanted = min(wanted, self._ceiling)
        capacity = max(wanted, self.capacity + STEP)
        return self._move(Relayout(low, self.write, 0, self.rows, capacity))

    def _move(self, change: Relayout) -> Relayout | None:
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
        """Raise AssertionError when the books do not balance."""
        assert self.num_free + self.num_active == self.num_slots
        assert self._starts.keys() == self._ends.keys()
        assert all(0 <= self.start(slot) <= self.write for slot in self._starts)
        assert all(0 <= slot < self.num_slots for slot in self._starts)
        assert self.write <= self.capacity
        assert self.num_rows <= self.rows <= self.num_slots or not self._starts


def _strain(lines: Sequence[_Line | None], slot: int, new: _Line) -> int:
    """What a row in ``slot`` adds to the differences between neighbours in use."""
    before = next((line for line in reversed(lines[:slot]) if line is not None), None)
    after = next((line for line in lines[slot + 1 :] if line is not None), None)
    if before is None or after is None:
        known = before or after
        return 0 if known is None else _difference(new, known)
    return _difference(new, before) + _difference(new, after) - _difference(before, after)


def _difference(one: _Line, other: _Line) -> int:
    return abs(one[1] - other[1]) + (_APART if one[0] != other[0] else 0)
