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
"""

from __future__ import annotations

from dataclasses import dataclass

STEP = 256  # capacities are multiples of this


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
    """What a row asks for: tokens already in the cache, and tokens still to come at most."""

    length: int
    remaining: int


class SlotLayout:
    """Slots, columns and their growth; the tensors follow what this decides."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
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
        return min(self._starts.values(), default=self.write)

    def start(self, slot: int) -> int:
        """First column of a row; for a free slot the write column: it owns nothing."""
        return self._starts.get(slot, self.write)

    def cells_needed(self, extra: list[Demand]) -> int:
        """Rows times columns that the buffers would grow to with ``extra`` rows admitted."""
        lengths = [self.write - start for start in self._starts.values()]
        lengths += [demand.length for demand in extra]
        remaining = [end - self.write for end in self._ends.values()]
        remaining += [demand.remaining for demand in extra]
        columns = round_up(max(lengths, default=0) + max(remaining, default=0))
        if not self._starts and not self._is_kept(columns):
            return self._rows_for(len(extra)) * columns
        rows = max(self.rows, self._rows_for(self.num_active + len(extra)))
        return rows * max(self.capacity, columns)

    def _is_kept(self, columns: int) -> bool:
        """Whether buffers that nobody is in stay as they are for a row that needs ``columns``."""
        return columns <= self.capacity <= 4 * columns

    def _rows_for(self, count: int) -> int:
        """Rows are added by doubling."""
        return min(self.num_slots, 1 << max(0, count - 1).bit_length())

    def admit(self, demand: Demand) -> tuple[int, Relayout | None]:
        """Give a row a slot; its tokens belong at ``[start(slot), write)`` after the relayout."""
        if not self.num_free:
            raise ValueError("no slot is free")
        slot = next(i for i in range(self.num_slots) if i not in self._starts)
        change = self._make_room(demand, slot)
        self._starts[slot] = self.write - demand.length
        self._ends[slot] = self.write + demand.remaining
        return slot, change

    def _make_room(self, demand: Demand, slot: int) -> Relayout | None:
        """Columns for a new row's tokens and at least one step after them; a row for its slot."""
        if not self._starts:  # nobody's tokens to keep: start afresh, unless the buffers fit
            self.write = demand.length
            if self._is_kept(round_up(demand.length + demand.remaining)):
                return None
            wanted = round_up(demand.length + min(demand.remaining, STEP))
            return self._move(Relayout(0, 0, 0, self._rows_for(slot + 1), wanted))
        rows = max(self.rows, self._rows_for(slot + 1))
        shift = max(0, demand.length - self.write)
        capacity = max(self.capacity, round_up(self.write + shift + 1))
        return self._move(Relayout(self.lowest, self.write, shift, rows, capacity))

    def before_step(self) -> Relayout | None:
        """Make sure that the write column exists."""
        if self.write < self.capacity:
            return None
        low, last = self.lowest, max(self._ends.values(), default=self.write)
        if low >= STEP and (low >= self.capacity // 4 or last - low <= self.capacity):
            return self._move(Relayout(low, self.write, -low, self.rows, self.capacity))
        capacity = max(round_up(min(self.capacity * 3 // 2, last)), self.capacity + STEP)
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

    def close_gap(self) -> tuple[int, int] | None:
        """Move the highest row into the lowest free slot below it; (from, to), or None."""
        highest = self.num_rows - 1
        gap = next((i for i in range(highest) if i not in self._starts), None)
        if gap is None:
            return None
        self._starts[gap], self._ends[gap] = self._starts.pop(highest), self._ends.pop(highest)
        return highest, gap

    def check(self) -> None:
        """Raise AssertionError when the books do not balance."""
        assert self.num_free + self.num_active == self.num_slots
        assert self._starts.keys() == self._ends.keys()
        assert all(0 <= start <= self.write for start in self._starts.values())
        assert all(0 <= slot < self.num_slots for slot in self._starts)
        assert self.write <= self.capacity
        assert self.num_rows <= self.rows <= self.num_slots or not self._starts
