"""Which rows are computed together, and when: no tensors."""

from __future__ import annotations

import subprocess
import sys

from batchkv_worker.kv.layout import Demand
from batchkv_worker.kv.layouts import Costs, SlotLayouts
from batchkv_worker.kv.stem import Stem
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


def sharing(
    slots: int = 8, cached: int = 10**6, shares: bool = True, stem_cost: int = 3 * 256
) -> Scheduler:
    """All full blocks of a row are here, up to ``cached`` tokens."""
    budget = Budget(512, 10**9, Costs(1))

    def num_cached(row: Sequence) -> int:
        return min(cached, 256 * len(row.block_keys))

    layouts = SlotLayouts(slots)
    return Scheduler(layouts, budget, num_cached, shares=shares, stem_cost=stem_cost)


def keyed(name: str, keys: str, own: int = 9) -> Sequence:
    """A row of a block a letter and ``own`` tokens after them that it computes."""
    found = row(name, 256 * len(keys) + own)
    found.block_keys = [keys[: number + 1].encode() for number in range(len(keys))]
    return found


def behind(plan: Scheduler, keys: str) -> None:
    """A row in a slot with a stem of these blocks."""
    here = {stem.key: stem for stem in plan.layouts.stems.values()}
    stem = here.get(keys.encode()) or Stem(keys.encode(), 256 * len(keys), {}, {})
    demand = Demand(stem.num_tokens + 5, 10, stem.num_tokens)
    slot, _ = plan.layouts.make_way(demand, stem)
    plan.layouts.admit(demand, slot, stem)


def test_few_rows_share_nothing() -> None:
    """A prefix is held once when enough is saved, and where sharing is allowed."""
    for shares in (True, False):
        for count in range(1, 7):
            plan = sharing(shares=shares, stem_cost=3 * 512)
            rows = [keyed(str(number), "ab") for number in range(count)]
            for one in rows:
                plan.add(one)
            group = plan.next_group()
            assert group is not None and len(group.rows) == count
            assert group.stem_blocks == (2 if shares and count >= 4 else 0)


def test_rows_that_left_do_not_count() -> None:
    """Cancelled rows, and rows of a group that was formed, wait for nothing any more."""
    plan = sharing(stem_cost=3 * 512)
    rows = [keyed(str(number), "ab") for number in range(5)]
    for one in rows:
        plan.add(one)
    assert plan.stem_blocks(rows[0], 512) == 2
    plan.cancel("1")
    assert plan.stem_blocks(rows[0], 512) == 2
    plan.cancel("2")
    assert plan.stem_blocks(rows[0], 512) == 0


def test_the_depth_that_saves_most_is_shared() -> None:
    """A block that eight rows have against three that four have; a longer tail wins the other way.

    Only cached blocks count, and a row keeps a token of its own.
    """
    plan = sharing()
    deep = [keyed(f"d{number}", "abc") for number in range(4)]
    for one in (*deep, *(keyed(f"s{number}", "ax") for number in range(4))):
        plan.add(one)
    assert plan.stem_blocks(deep[0], 10**6) == 3  # 3 * 3 against 7 * 1
    assert plan.stem_blocks(deep[0], 767) == 1  # two blocks would save 6
    for number in range(4):
        plan.add(keyed(f"t{number}", "ay"))
    assert plan.stem_blocks(deep[0], 10**6) == 1  # 11 against 9
    assert plan.stem_blocks(deep[0], 255) == 0


def test_a_row_keeps_a_token_of_its_own() -> None:
    """A prompt that ends with a block, but for the token that decoding takes, has a block less."""
    plan = sharing()
    rows = [keyed(str(number), "ab", own=0 if number < 2 else 1) for number in range(6)]
    for one in rows:
        plan.add(one)
    assert [plan.stem_blocks(one, 512) for one in rows] == [1, 1, 2, 2, 2, 2]
    group = plan.next_group()
    assert group is not None and group.stem_blocks == 1 and len(group.rows) == 6
    for one in reversed(rows):
        plan.add(one)
    plan.group = None
    group = plan.next_group()
    assert group is not None and group.stem_blocks == 2 and len(group.rows) == 4


def test_a_stem_that_is_there_is_taken() -> None:
    """One row is enough for a stem that rows in slots have; of several the longest."""
    plan = sharing()
    behind(plan, "a")
    lonely = keyed("x", "abcd")
    plan.add(lonely)
    assert plan.stem_blocks(lonely, 1024) == 1
    for number in range(4):
        plan.add(keyed(str(number), "abcd"))
    assert plan.stem_blocks(lonely, 1024) == 1  # rather than another one of four blocks
    behind(plan, "abc")
    assert plan.stem_blocks(lonely, 1024) == 3
    behind(plan, "zzzz")
    assert plan.stem_blocks(lonely, 1024) == 3
    assert plan.stem_blocks(lonely, 700) == 1


def test_rows_of_another_prefix_are_not_in_the_group() -> None:
    """All rows of a group have its stem; the others come after them, with theirs."""
    plan = sharing(slots=16)
    for number in range(5):
        plan.add(keyed(f"a{number}", "abb"))
        plan.add(keyed(f"b{number}", "xyz"))
        plan.add(keyed(f"c{number}", "aqq"))
    seen = []
    while (group := plan.next_group()) is not None:
        assert group.stem_blocks == 3
        seen.append("".join(sorted(one.job_id for one in group.rows)))
        plan.group = None
    assert seen == ["a0a1a2a3a4", "b0b1b2b3b4", "c0c1c2c3c4"]


def test_shared_tokens_count_once_in_the_memory() -> None:
    """Rows behind a prefix need room for it once, wherever it is, and for their own columns."""
    costs = Costs(1)
    for count in (4, 8):
        layouts = SlotLayouts(8)
        demands = [Demand(4096 + 10, 10, 4096) for _ in range(count)]
        assert layouts.bytes_needed(costs, demands) == 4096 + count * 256
        twofold = Costs(1, beside_stem=2)  # prefill reads it in another form than decode does
        assert layouts.bytes_needed(twofold, demands) == 3 * 4096 + count * 256
    assert costs.prefill(4096 + 10, 4096, 99) == 10
    plan = sharing()
    for keys in ("ab", "abc", "ab"):
        behind(plan, keys)
    assert plan.layouts.bytes_needed(costs, []) == 512 + 768 + 4 * 256


def test_scheduler_needs_no_tensors() -> None:
    """The module names no MLX (its source is checked, since tests share a process)."""
    source = sys.modules["batchkv_worker.scheduler"].__file__
    assert source is not None
    with open(source) as file:
        assert "mlx" not in file.read().lower().replace("tested without mlx", "")


def test_it_knows_no_tensors() -> None:
    """Nothing that it imports brings MLX in."""
    code = "import sys, batchkv_worker.scheduler; print('mlx.core' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "False\n"
