"""The slot layout: columns, slots and growth, without tensors."""

from __future__ import annotations

import random

import pytest

from batchkv_worker.kv.slots.changes import Demand, Relayout
from batchkv_worker.kv.slots.growth import round_up
from batchkv_worker.kv.slots.layout import SlotLayout
from batchkv_worker.kv.slots.step_view import ColumnSpan, Shapes


def test_rows_end_at_the_write_column() -> None:
    """A new row's tokens are right before the column that all rows write next."""
    layout = SlotLayout(4)
    slot, change = layout.admit(Demand(100, 20))
    assert (slot, layout.start(slot), layout.write) == (0, 0, 100)
    assert change == Relayout(0, 0, 0, 1, 256)
    other, _ = layout.admit(Demand(30, 20))
    assert layout.write - layout.start(other) == 30


def test_a_longer_row_shifts_the_others_right() -> None:
    """A row longer than the write column makes room on the left for itself."""
    layout = SlotLayout(2)
    layout.admit(Demand(10, 5))
    slot, change = layout.admit(Demand(300, 5))
    assert change is not None and change.shift == 290 and change.capacity == 512
    assert layout.start(slot) == 0 and layout.start(0) == 290


def test_a_window_keeps_its_last_columns_and_stops_growing() -> None:
    """With a window of 40 a row owns 39 columns at most, and 5,000 steps stay in few columns."""
    layout = SlotLayout(2, window=40)
    slot, _ = layout.admit(Demand(1000, 5000))
    assert layout.length(slot) == 39 == layout.kept(1000)
    for _ in range(5000):
        layout.before_step()
        layout.after_step()
        layout.check()
        assert layout.length(slot) == 39
    assert layout.capacity <= 512


def test_idle_buffers_that_a_first_row_keeps_are_reckoned_with() -> None:
    """A group's need includes wide buffers that its first row keeps and its second makes grow."""
    layout = SlotLayout(32)
    for slot in range(32):
        layout.admit(Demand(3000, 900), slot)
    for slot in range(32):
        layout.release(slot)
    group = [Demand(100, 900), Demand(100, 7900)]
    bound = layout.cells_needed(group)
    for demand in group:
        layout.admit(demand)
    for _ in range(7900):
        layout.before_step()
        layout.after_step()
    assert layout.rows * layout.capacity <= bound


def test_rows_of_like_length_become_neighbours() -> None:
    """A short row among long ones moves to another slot for a long one."""
    layout = SlotLayout(8)
    for length in (2000, 2000, 20, 2000, 20, 20, 20):
        layout.admit(Demand(length, 10))
    slot, moved_to = layout.choose(2000)
    assert (slot, moved_to) == (2, 7)
    slot, moved_to = layout.choose(20)
    assert (slot, moved_to) == (7, None)


def test_released_slots_are_used_again() -> None:
    """The slot of a row that ended goes to the next row."""
    layout = SlotLayout(2)
    first, _ = layout.admit(Demand(5, 5))
    layout.admit(Demand(5, 5))
    layout.release(first)
    assert layout.admit(Demand(5, 5))[0] == first
    with pytest.raises(ValueError, match="no slot is free"):
        layout.admit(Demand(1, 1))


def test_free_columns_on_the_left_are_used_before_growing() -> None:
    """When the long row has left, the buffer shifts left and keeps its size."""
    layout = SlotLayout(2)
    long, _ = layout.admit(Demand(700, 200))
    layout.admit(Demand(10, 600))
    while layout.write < layout.capacity:
        layout.after_step()
    layout.release(long)
    capacity = layout.capacity
    change = layout.before_step()
    assert change is not None and change.shift < 0 and layout.capacity == capacity
    assert layout.lowest == 0


def test_gap_is_closed_by_the_highest_row() -> None:
    """If no row waits, the highest row moves down, and steps compute fewer rows."""
    layout = SlotLayout(3)
    slots = [layout.admit(Demand(5, 5))[0] for _ in range(3)]
    layout.release(slots[0])
    assert layout.gap() == (2, 0)
    layout.move(2, 0)
    assert layout.num_rows == 2 and layout.gap() is None


@pytest.mark.parametrize("window", [None, 64, 700])
def test_memory_estimate_is_an_upper_bound(window: int | None) -> None:
    """The buffers never exceed the estimate at admission, for any order of rows."""
    rng = random.Random(5)
    for _ in range(50):
        layout = SlotLayout(8, window)
        active: dict[int, int] = {}
        bound = 0
        for _ in range(400):
            if layout.num_free and rng.random() < 0.2:
                demand = Demand(rng.randrange(0, 900), rng.randrange(1, 300))
                bound = max(bound, layout.cells_needed([demand]))
                slot, free = layout.choose(layout.kept(demand.length))
                if free is not None:
                    layout.move(slot, free)
                    active[free] = active.pop(slot)
                layout.admit(demand, slot)
                active[slot] = demand.remaining
            if active:
                layout.before_step()
                layout.after_step()
            for slot in list(active):
                active[slot] -= 1
                if active[slot] == 0:
                    layout.release(slot)
                    del active[slot]
            layout.check()
            # Columns left of the lowest row may stand unused until a shift: a third at most.
            assert layout.rows * layout.capacity <= bound * 4 / 3 + layout.rows * 2 * 256


class Replay:
    """A table of strings that follows a layout as the tensors do, and what each row should hold."""

    def __init__(self, num_slots: int, window: int | None) -> None:
        self.layout = SlotLayout(num_slots, window)
        self.table: list[list[str]] = []
        self.truth: dict[int, list[str]] = {}

    def apply(self, change: Relayout | None) -> None:
        if change is None:
            return
        new = [["" for _ in range(change.capacity)] for _ in range(change.rows)]
        for row, old in zip(new, self.table, strict=False):
            kept = old[change.low : change.high]
            row[change.low + change.shift : change.high + change.shift] = kept
        self.table = new

    def admit(self, name: str, length: int) -> None:
        slot, free = self.layout.choose(self.layout.kept(length))
        if free is not None:
            self.move(slot, free)
        _, change = self.layout.admit(Demand(length, 100), slot)
        self.apply(change)
        self.truth[slot] = [f"{name}.{i}" for i in range(length)]
        kept, write = self.layout.kept(length), self.layout.write
        self.table[slot][write - kept : write] = self.truth[slot][length - kept :]

    def move(self, source: int, target: int) -> None:
        self.layout.move(source, target)
        self.table[target] = list(self.table[source])
        self.truth[target] = self.truth.pop(source)

    def step(self, name: str) -> None:
        self.apply(self.layout.before_step())
        for slot in range(self.layout.num_rows):
            self.table[slot][self.layout.write] = f"{name}w{slot}"
        for slot, tokens in self.truth.items():
            tokens.append(f"{name}w{slot}")
        self.layout.after_step()

    def release(self, slot: int) -> None:
        self.layout.release(slot)
        del self.truth[slot]
        if (move := self.layout.gap()) is not None:
            self.move(*move)

    def check(self) -> None:
        self.layout.check()
        for slot, tokens in self.truth.items():
            row = self.table[slot][self.layout.start(slot) : self.layout.write]
            assert row == tokens[len(tokens) - self.layout.kept(len(tokens)) :]


@pytest.mark.parametrize("window", [None, 1, 2, 40, 300])
def test_contents_survive_random_histories(window: int | None) -> None:
    """Replaying every relayout on real columns, each row always finds exactly its own tokens."""
    rng = random.Random(11)
    replay = Replay(4, window)
    for turn in range(3000):
        if replay.layout.num_free and rng.random() < 0.05:
            replay.admit(str(turn), rng.choice([0, 1, 7, 255, 256, 257, 600]))
        if replay.truth:
            replay.step(str(turn))
        if replay.truth and rng.random() < 0.04:
            replay.release(rng.choice(list(replay.truth)))
        replay.check()


def test_round_up() -> None:
    """Capacities are multiples of a block."""
    assert [round_up(n) for n in (0, 1, 256, 257)] == [0, 256, 256, 512]


def test_rows_of_one_length_are_read_from_their_own_column() -> None:
    """Columns are rounded down and up where rows differ, and not at all where they do not."""
    layout = SlotLayout(4)
    for slot, length in enumerate((100, 30, 30, 90)):
        layout.admit(Demand(length, 10), slot)
    span = ColumnSpan(layout, 4, [1, 3], Shapes(step=64))
    assert [(group.low, group.high) for group in span.groups] == [(0, 128), (64, 128), (0, 128)]
    assert all(group.mask is not None for group in span.groups)
    exact = [(group.low, group.high, group.mask) for group in span.exact_groups]
    assert exact == [(0, 101, None), (70, 101, None), (10, 101, None)]
    ragged = ColumnSpan(layout, 4, [2], Shapes(step=64)).exact_groups[0]
    assert not ragged.is_exact and ragged.mask is not None
