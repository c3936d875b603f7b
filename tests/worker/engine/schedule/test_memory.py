"""The one owner of the memory for keys and values."""

from __future__ import annotations

import ast
from pathlib import Path

import batchkv_worker
from batchkv_worker.engine.schedule.admission import Budget
from batchkv_worker.engine.schedule.memory import Memory
from batchkv_worker.engine.schedule.prefill_group import PrefillGroup
from batchkv_worker.kv.attention.prefix_part import PrefixPart
from batchkv_worker.kv.slots.changes import Demand
from batchkv_worker.kv.slots.layouts import Costs, SlotLayouts
from batchkv_worker.sequence import Generation, Sequence

# What tells bytes of the layouts, and what compares them with the budget.
ARITHMETIC = {
    "bytes_held",
    "bytes_needed",
    "bytes_of_new",
    "peak_bytes",
    "bytes_of_shared",
    "max_cells",
}


def test_a_snapshot_counts_slots_and_the_group_in_prefill() -> None:
    """It has the buffers, the group at its full width, and the budget."""
    layouts = SlotLayouts(4)
    memory = Memory(layouts, Budget(256, 10_000, Costs(2, largest=1)))
    assert memory.snapshot().total == 0
    layouts.admit(Demand(300, 10), 0)
    group = PrefillGroup([Sequence(name, [1] * 101, Generation(5)) for name in "ab"])
    held = memory.snapshot(group)
    assert held.slots == layouts.main.rows * layouts.main.capacity * 3
    assert (held.prefill, held.allowed) == (2 * 100 * 3, 10_000)
    assert held.total == held.slots + held.prefill


def test_a_group_behind_a_shared_prefix_counts_its_own_tokens_and_the_prefix_once() -> None:
    """As many bytes are in use as its rows were admitted with."""
    budget = Budget(256, 10_000, Costs(2, extra_per_shared=4, largest=1))
    memory = Memory(SlotLayouts(4), budget)
    rows = [Sequence(name, [1] * 601, Generation(5)) for name in "ab"]
    group = PrefillGroup(rows, split_points=(256, 512))
    own = budget.prefill_bytes(group.demands)
    assert memory.snapshot(group).prefill == own == 2 * (600 - 512) * 3
    group.share(PrefixPart(b"ab", 512, PrefixPart(b"a", 256, None)))
    assert memory.snapshot(group).prefill == own + 512 * 6
    memory.set_aside(group)
    assert memory.snapshot().prefill == own + 512 * 6


def test_what_fits_is_what_is_left() -> None:
    """To the byte: a second row needs the grown buffers, and its prefill."""
    costs = Costs(1)
    layouts = SlotLayouts(2)
    layouts.admit(Demand(200, 10), 0)
    needed = 2 * 256 + 50  # two rows of 256 columns, and its prompt beside them
    assert Memory(layouts, Budget(512, needed, costs)).fits([Demand(50, 10)])
    assert not Memory(layouts, Budget(512, needed - 1, costs)).fits([Demand(50, 10)])


def test_less_is_used_after_memory_ran_out_and_more_with_every_row() -> None:
    """Four fifths of the bytes in use; later the whole budget again, and no more."""
    memory = Memory(SlotLayouts(2), Budget(512, 10_000, Costs(1)))
    memory.shrink(8_000)
    assert memory.budget.memory_bytes == 6_400 == memory.snapshot().allowed
    memory.shrink(10**9)
    assert memory.budget.memory_bytes == 5_120
    seen = []
    while memory.budget.memory_bytes < 10_000:
        seen.append(memory.budget.memory_bytes)
        memory.relax()
    assert seen == sorted(set(seen)) and len(seen) > 3
    memory.relax()
    assert memory.budget.memory_bytes == 10_000 == memory.whole.memory_bytes


def test_a_row_that_fits_alone_is_measured_by_the_whole_budget() -> None:
    """A row is not refused for good because memory is short for a moment."""
    memory = Memory(SlotLayouts(2), Budget(512, 1_000, Costs(1)))
    assert memory.fits_alone(Demand(200, 10))
    memory.shrink(300)
    assert memory.fits_alone(Demand(200, 10)) and not memory.fits([Demand(200, 10)])


def test_nobody_else_does_its_sums() -> None:
    """In the engine, only the memory asks the layouts for bytes."""
    root = Path(batchkv_worker.__file__).parent / "engine"
    found = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ARITHMETIC
        if not (isinstance(node.value, ast.Attribute) and node.value.attr == "memory")
    }
    assert found == {"schedule/memory.py"}
