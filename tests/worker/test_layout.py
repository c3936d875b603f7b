"""The slot layout: columns, slots and growth, without a tensor in sight."""

from __future__ import annotations

import random

import pytest

from batchkv_worker.kv.layout import Demand, Relayout, SlotLayout, round_up


def test_rows_end_at_the_write_column() -> None:
    """A new row's tokens stand right before the column that everybody writes next."""
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
    """With nobody waiting the highest row moves down, and steps compute fewer rows."""
    layout = SlotLayout(3)
    slots = [layout.admit(Demand(5, 5))[0] for _ in range(3)]
    layout.release(slots[0])
    assert layout.close_gap() == (2, 0)
    assert layout.num_rows == 2 and layout.close_gap() is None


def test_memory_estimate_is_an_upper_bound() -> None:
    """Whatever comes and goes, the buffers never exceed what was estimated at admission."""
    rng = random.Random(5)
    for _ in range(50):
        layout = SlotLayout(8)
        active: dict[int, int] = {}
        bound = 0
        for _ in range(400):
            if layout.num_free and rng.random() < 0.2:
                demand = Demand(rng.randrange(0, 900), rng.randrange(1, 300))
                bound = max(bound, layout.cells_needed([demand]))
                slot, _ = layout.admit(demand)
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


def test_contents_survive_random_histories() -> None:
    """Replaying every relayout on real columns, each row always finds exactly its own tokens."""
    rng = random.Random(11)
    layout = SlotLayout(4)
    table: list[list[str]] = []
    truth: dict[int, list[str]] = {}

    def apply(change: Relayout | None) -> None:
        nonlocal table
        if change is None:
            return
        new = [["" for _ in range(change.capacity)] for _ in range(change.rows)]
        for row, old in zip(new, table, strict=False):
            kept = old[change.low : change.high]
            row[change.low + change.shift : change.high + change.shift] = kept
        table = new

    for turn in range(3000):
        if layout.num_free and rng.random() < 0.05:
            length = rng.choice([0, 1, 7, 255, 256, 257, 600])
            slot, change = layout.admit(Demand(length, 100))
            apply(change)
            truth[slot] = [f"{turn}.{i}" for i in range(length)]
            table[slot][layout.write - length : layout.write] = truth[slot]
        if truth:
            apply(layout.before_step())
            for slot in range(layout.num_rows):
                table[slot][layout.write] = f"{turn}w{slot}"
                if slot in truth:
                    truth[slot].append(f"{turn}w{slot}")
            layout.after_step()
        if truth and rng.random() < 0.04:
            slot = rng.choice(list(truth))
            layout.release(slot)
            del truth[slot]
            if (move := layout.close_gap()) is not None:
                source, target = move
                table[target] = list(table[source])
                truth[target] = truth.pop(source)
        for slot, tokens in truth.items():
            assert table[slot][layout.start(slot) : layout.write] == tokens
        layout.check()


def test_round_up() -> None:
    """Capacities are multiples of a block."""
    assert [round_up(n) for n in (0, 1, 256, 257)] == [0, 256, 256, 512]
