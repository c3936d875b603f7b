"""Which rows are computed together, and when: no tensors."""

from __future__ import annotations

import sys

from batchkv_worker.kv.layout import Demand
from batchkv_worker.kv.layouts import Costs, SlotLayouts
from batchkv_worker.scheduler import Budget, Scheduler
from batchkv_worker.sequence import Generation, Sequence


def row(name: str, length: int, max_tokens: int = 10) -> Sequence:
    return Sequence(name, list(range(length + 1)), Generation(max_tokens))


def scheduler(slots: int = 4, chunk: int = 512, memory: int = 10**9) -> Scheduler:
    return Scheduler(SlotLayouts(slots), Budget(chunk, memory, Costs(1)))


def test_group_holds_the_oldest_and_its_like() -> None:
    """Rows of like length share a chunk; the oldest is always among them, so nobody starves."""
    plan = scheduler()
    for name, length in (("a", 100), ("b", 400), ("c", 110), ("d", 90), ("e", 105)):
        plan.add(row(name, length))
    group = plan.next_group()
    assert group is not None
    assert sorted(r.job_id for r in group.rows) == ["a", "c", "d", "e"]
    assert plan.num_waiting == 1


def test_group_never_exceeds_a_chunk_unless_alone() -> None:
    """Rows times width fit the chunk; one long prompt is a group of its own."""
    plan = scheduler(chunk=256)
    plan.add(row("long", 1000))
    plan.add(row("longer", 1001))
    group = plan.next_group()
    assert group is not None and len(group.rows) == 1


def test_memory_bounds_admission() -> None:
    """A row that does not fit beside the others waits; it runs when it is alone."""
    plan = scheduler(memory=4 * 256)
    plan.layouts.admit(Demand(300, 100), 0)
    plan.add(row("next", 300))
    assert plan.next_group() is None
    plan.layouts.release(0)
    assert plan.next_group() is not None


def test_a_row_too_big_for_the_memory_is_known_at_once() -> None:
    """Nothing waits forever: what can never fit is seen before it is queued."""
    budget = Budget(512, (768 + 500) * 256, Costs(256))
    assert budget.can_ever_hold(Demand(500, 200))
    assert not budget.can_ever_hold(Demand(900, 200))


def test_cancelled_rows_leave_wherever_they_are() -> None:
    """Waiting rows vanish; rows in prefill are dropped when their group is computed."""
    plan = scheduler(slots=2)
    for name in "abc":
        plan.add(row(name, 5))
    group = plan.next_group()
    assert group is not None
    assert plan.cancel("c") and plan.cancel("a") and not plan.cancel("zzz")
    group.position = group.width
    assert [r.job_id for r in plan.finish_group()] == ["b"]
    assert plan.num_waiting == 0


def test_models_without_lengths_compute_equal_prompts_only() -> None:
    """Where no row may have a pad, a group holds prompts of one length."""
    plan = Scheduler(SlotLayouts(8), Budget(512, 10**9, Costs(1)), ragged=False)
    for name, length in (("a", 100), ("b", 101), ("c", 100)):
        plan.add(row(name, length))
    group = plan.next_group()
    assert group is not None and [r.job_id for r in group.rows] == ["a", "c"]


def test_states_are_kept_where_prompts_part() -> None:
    """A chunk ends where another waiting prompt parts from the row's, and at its last block."""
    plan = Scheduler(SlotLayouts(8), Budget(1024, 10**9, Costs(1)), state_blocks=99)
    first, second = row("a", 1300), row("b", 900)
    first.block_keys = [b"1", b"2", b"3", b"4", b"5"]
    second.block_keys = [b"1", b"2", b"x"]
    plan.add(first)
    plan.add(second)
    group = plan.next_group()
    assert group is not None and group.rows == [first]
    assert first.state_stops == {512, 1280}
    ends = []
    while group.position < 1300:
        group.position = group.chunk_end(1024, 1300)
        ends.append(group.position)
    assert ends == [512, 1280, 1300]


def test_windows_and_states_count_in_the_memory() -> None:
    """A window's bytes stop growing with the row; a state's do not depend on its length."""
    windows, states = Costs(0, {100: 10}), Costs(0, {}, 1000)
    long, short = Demand(5000, 1000), Demand(200, 1000)
    layouts = SlotLayouts(4, [100])
    assert layouts.bytes_needed(windows, [long]) == layouts.bytes_needed(windows, [short])
    assert layouts.bytes_needed(states, [long, short]) == 2000
    assert not Budget(512, 999, states).can_ever_hold(short)


def test_scheduler_needs_no_tensors() -> None:
    """The module names no MLX (its source is checked, since tests share a process)."""
    source = sys.modules["batchkv_worker.scheduler"].__file__
    assert source is not None
    with open(source) as file:
        assert "mlx" not in file.read().lower().replace("tested without mlx", "")
