"""Which rows are computed together, and when: no tensors."""

from __future__ import annotations

import ast
import random
import subprocess
import sys
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

from batchkv_worker.engine import schedule
from batchkv_worker.engine.schedule.memory import Memory
from batchkv_worker.engine.schedule.prefix_split import (
    MAX_PARTS,
    PrefixCosts,
    SplitPoints,
    choose_split_points,
    num_shared,
)
from batchkv_worker.engine.schedule.scheduler import Budget, Scheduler
from batchkv_worker.kv.attention.prefix_part import PrefixPart
from batchkv_worker.kv.slots.changes import Demand
from batchkv_worker.kv.slots.layouts import Costs, SlotLayouts
from batchkv_worker.sequence import Generation, Sequence


def row(name: str, length: int, max_tokens: int = 10) -> Sequence:
    return Sequence(name, list(range(length + 1)), Generation(max_tokens))


def scheduler(slots: int = 4, chunk: int = 512, memory: int = 10**9) -> Scheduler:
    return Scheduler(SlotLayouts(slots), Budget(chunk, memory, Costs(1)))


def test_group_holds_the_oldest_and_its_like() -> None:
    """Rows of similar length share a chunk; the oldest is always among them, so none starves."""
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
    """A row that does not fit together with the others waits; it runs when it is alone."""
    plan = scheduler(memory=4 * 256)
    plan.layouts.admit(Demand(300, 100), 0)
    plan.add(row("next", 300))
    assert plan.next_group() is None
    plan.layouts.release(0)
    assert plan.next_group() is not None


def test_a_row_too_big_for_the_memory_is_known_at_once() -> None:
    """Nothing waits for ever: a row that can never fit is refused before it is queued."""
    memory = Memory(SlotLayouts(4), Budget(512, (768 + 500) * 256, Costs(256)))
    assert memory.fits_alone(Demand(500, 200))
    assert not memory.fits_alone(Demand(900, 200))


def test_cancelled_rows_leave_wherever_they_are() -> None:
    """Waiting rows vanish; rows in prefill are dropped when their group is computed."""
    plan = scheduler(slots=2)
    for name in "abc":
        plan.add(row(name, 5))
    group = plan.next_group()
    assert group is not None
    assert plan.cancel("c") and plan.cancel("a") and not plan.cancel("zzz")
    group.advance(group.width)
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
        group.advance(group.chunk_end(1024, 1300))
        ends.append(group.position)
    assert ends == [512, 1280, 1300]


def test_windows_and_states_count_in_the_memory() -> None:
    """A window's bytes stop growing with the row; a state's do not depend on its length."""
    windows, states = Costs(0, {100: 10}), Costs(0, {}, 1000)
    long, short = Demand(5000, 1000), Demand(200, 1000)
    layouts = SlotLayouts(4, [100])
    assert layouts.bytes_needed(windows, [long]) == layouts.bytes_needed(windows, [short])
    assert layouts.bytes_needed(states, [long, short]) == 2000
    assert not Memory(layouts, Budget(512, 999, states)).fits_alone(short)


def sharing(
    slots: int = 8,
    cached: int = 10**6,
    shares: bool = True,
    prefix_cost: int = 3 * 256,
    most: int = MAX_PARTS,
    joined: int = 0,
    memory: int = 10**9,
) -> Scheduler:
    """All full blocks of a row are here, up to ``cached`` tokens."""
    budget = Budget(512, memory, Costs(1))

    def num_cached(row: Sequence) -> int:
        return min(cached, 256 * len(row.block_keys))

    layouts = SlotLayouts(slots)
    costs = PrefixCosts(prefix_cost, prefix_cost, most, joined)
    return Scheduler(layouts, budget, num_cached, shares=shares, prefix_costs=costs)


def keyed(name: str, keys: str, own: int = 9) -> Sequence:
    """A row of a block a letter and ``own`` tokens after them that it computes."""
    found = row(name, 256 * len(keys) + own)
    found.block_keys = [keys[: number + 1].encode() for number in range(len(keys))]
    return found


def tokens(*blocks: int) -> SplitPoints:
    """The ends of shared prefixes that have so many blocks."""
    return tuple(256 * count for count in blocks)


def depth(plan: Scheduler, row: Sequence, num_cached: int) -> int:
    """Blocks of the row in shared prefixes."""
    return num_shared(plan.split_points(row, num_cached)) // 256


def behind(plan: Scheduler, keys: str, *cuts: int) -> PrefixPart:
    """A row in a slot with shared prefixes of these blocks; ``cuts`` are their ends."""
    here, part = plan.layouts.all_prefixes, None
    for end in (*cuts, len(keys)):
        key = keys[:end].encode()
        part = here.get(key) or PrefixPart(key, 256 * end, part)
    assert part is not None
    demand = Demand(part.num_tokens + 5, 10, part.num_tokens)
    slot, _ = plan.layouts.make_way(demand, part)
    plan.layouts.admit(demand, slot, part)
    return part


def test_few_rows_share_nothing() -> None:
    """A prefix is stored once if that saves enough, and if sharing is allowed."""
    for shares in (True, False):
        for count in range(1, 7):
            plan = sharing(shares=shares, prefix_cost=3 * 512)
            rows = [keyed(str(number), "ab") for number in range(count)]
            for one in rows:
                plan.add(one)
            group = plan.next_group()
            assert group is not None and len(group.rows) == count
            assert group.num_shared == (512 if shares and count >= 4 else 0)


def test_rows_that_left_do_not_count() -> None:
    """Cancelled rows, and rows of a group that was formed, wait for nothing any more."""
    plan = sharing(prefix_cost=3 * 512)
    rows = [keyed(str(number), "ab") for number in range(5)]
    for one in rows:
        plan.add(one)
    assert depth(plan, rows[0], 512) == 2
    plan.cancel("1")
    assert depth(plan, rows[0], 512) == 2
    plan.cancel("2")
    assert depth(plan, rows[0], 512) == 0


def test_the_depth_that_saves_most_is_shared() -> None:
    """A block that eight rows have against three that four have; a longer tail wins the other way.

    Only cached blocks count, and a row keeps a token of its own. Here a chain has one prefix.
    """
    plan = sharing(most=1)
    deep = [keyed(f"d{number}", "abc") for number in range(4)]
    for one in (*deep, *(keyed(f"s{number}", "ax") for number in range(4))):
        plan.add(one)
    assert depth(plan, deep[0], 10**6) == 3  # 3 * 3 against 7 * 1
    assert depth(plan, deep[0], 767) == 1  # two blocks would save 6
    for number in range(4):
        plan.add(keyed(f"t{number}", "ay"))
    assert depth(plan, deep[0], 10**6) == 1  # 11 against 9
    assert depth(plan, deep[0], 255) == 0


def test_a_row_keeps_a_token_of_its_own() -> None:
    """A prompt that ends with a block, but for the token that decoding takes, has a block less."""
    plan = sharing()
    rows = [keyed(str(number), "ab", own=0 if number < 2 else 1) for number in range(6)]
    for one in rows:
        plan.add(one)
    assert [depth(plan, one, 512) for one in rows] == [1, 1, 2, 2, 2, 2]
    group = plan.next_group()
    assert group is not None and group.num_shared == 1 * 256 and len(group.rows) == 6
    for one in plan.abandon_group():
        one.recompute(was_alone=False)
    plan.requeue(reversed(rows))
    group = plan.next_group()
    assert group is not None and group.num_shared == 2 * 256 and len(group.rows) == 4


def test_a_prefix_that_is_there_is_taken() -> None:
    """One row is enough for a shared prefix that rows in slots have; of several the longest."""
    plan = sharing(most=1)
    behind(plan, "a")
    lonely = keyed("x", "abcd")
    plan.add(lonely)
    assert depth(plan, lonely, 1024) == 1
    for number in range(4):
        plan.add(keyed(str(number), "abcd"))
    assert depth(plan, lonely, 1024) == 1  # rather than another one of four blocks
    behind(plan, "abc")
    assert depth(plan, lonely, 1024) == 3
    behind(plan, "zzzz")
    assert depth(plan, lonely, 1024) == 3
    assert depth(plan, lonely, 700) == 1


def test_prefixes_grow_on_prefixes() -> None:
    """Rows of a shared prefix that share more get a longer one on top, if it alone saves enough."""
    plan = sharing()
    deep = [keyed(f"d{number}", "abcd") for number in range(4)]
    rest = [keyed(f"s{number}", "axyz"[: 1 + number % 4]) for number in range(6)]
    for one in (*deep, *rest):
        plan.add(one)
    assert plan.split_points(deep[0], 10**6) == tokens(1, 4)  # 9 * 1 and 3 * 3
    assert plan.split_points(rest[3], 10**6) == tokens(
        1, 2
    )  # 3 * 1: what it stands on is read for all
    assert plan.split_points(deep[0], 600) == tokens(1, 2)  # 3 * 1 more
    assert sharing(most=0).split_points(deep[0], 10**6) == ()
    dear = sharing(prefix_cost=9 * 256)
    for one in (*deep, *rest):
        dear.add(one)
    assert dear.split_points(deep[0], 10**6) == tokens(4)  # 3 * 4 at once


def test_what_is_held_is_grown_on() -> None:
    """The shared prefixes of rows in slots do not change, nor do those that they extend."""
    plan = sharing()
    leaf = behind(plan, "abc", 1)
    assert [part.key for part in leaf.chain] == [b"a", b"abc"]
    lonely = keyed("x", "abcdefg")
    plan.add(lonely)
    assert plan.split_points(lonely, 10**6) == tokens(1, 3)
    assert plan.split_points(keyed("y", "aq"), 10**6) == tokens(1)
    assert plan.split_points(keyed("z", "ab"), 10**6) == tokens(
        1
    )  # the second block stands inside one
    for number in range(2):
        plan.add(keyed(str(number), "abcdefg"))
    assert plan.split_points(lonely, 10**6) == tokens(1, 3, 7)
    computed = PrefixPart(b"abcd", 4 * 256, leaf)  # that no row in a slot has yet
    assert plan.split_points(lonely, 10**6, computed) == tokens(1, 3, 4, 7)
    behind(plan, "abcdefg", 1, 3)
    assert len(plan.layouts.all_prefixes) == 3


def test_a_chain_has_so_many_prefixes_at_most() -> None:
    for most in (1, 2, 3, 4):
        plan = sharing(slots=16, prefix_cost=0, most=most)
        for depth, count in ((1, 40), (2, 20), (3, 10), (4, 8)):
            for number in range(count):
                plan.add(keyed(f"{depth} {number}", "abcd"[:depth]))
        cuts = plan.split_points(keyed("x", "abcde"), 10**6)
        assert len(cuts) == most
        *inner, last = (cut // 256 for cut in cuts)
        behind(plan, "abcd"[:last], *inner)
        assert plan.split_points(keyed("x", "abcde"), 10**6) == cuts


def worth(
    cuts: SplitPoints, wanted: list[int], held: SplitPoints, costs: PrefixCosts
) -> int | None:
    """Cells that these cuts save; None when one of them saves less than it costs."""
    total = 0
    for low, high in pairwise((0, *cuts)):
        if high in held:
            continue
        cells = (wanted[high // 256 - 1] - 1) * (high - low)
        cost = costs.another if low else costs.first
        if cells < max(1, cost):
            return None
        total += cells - cost
    return total


def test_of_all_ways_to_cut_the_best_is_taken() -> None:
    """Against all there are, of random prompts."""
    rng = random.Random(5)
    for _ in range(300):
        wanted = sorted((rng.randrange(1, 9) for _ in range(rng.randrange(8))), reverse=True)
        costs = PrefixCosts(rng.randrange(2000), rng.randrange(2000), rng.randrange(1, 4))
        held = tokens(1) if wanted and rng.random() < 0.3 else ()
        ends = range(len(held) + 1, len(wanted) + 1)
        ways = [
            (*held, *tokens(*cuts))
            for count in range(costs.most - len(held) + 1)
            for cuts in combinations(ends, count)
        ]
        best = max(
            value
            for value in (worth(cuts, wanted, held, costs) for cuts in ways)
            if value is not None
        )
        assert worth(choose_split_points(wanted, 256, held, costs), wanted, held, costs) == best, (
            wanted,
            held,
            costs,
        )


def test_only_the_places_where_rows_part_are_tried() -> None:
    """A long prompt is cut in no time: 2,000 blocks, parted at each."""
    cuts = choose_split_points(range(4000, 2000, -1), 256, (), PrefixCosts(1000, 1000, 4))
    assert 1 <= len(cuts) <= 4
    assert choose_split_points([5] * 2000, 256, (), PrefixCosts(1000, 1000, 4)) == tokens(2000)


def test_a_parked_row_comes_back_behind_as_many_tokens() -> None:
    plan = sharing()
    behind(plan, "abc", 1)
    for shared, cuts in ((0, ()), (1, (1,)), (2, (1, 2)), (3, (1, 3)), (4, (1, 3, 4))):
        one = keyed("x", "abcde")
        one.parked, one.num_shared = b"row", 256 * shared
        plan.add(one)
        group = plan.next_group()
        assert group is not None
        assert (group.split_points, group.num_shared) == (tokens(*cuts), 256 * shared)
        plan.abandon_group()


def test_rows_of_another_prefix_are_not_in_the_group() -> None:
    """All rows of a group have its shared prefix; the others come after them, with theirs."""
    plan = sharing(slots=16)
    for number in range(5):
        plan.add(keyed(f"a{number}", "abb"))
        plan.add(keyed(f"b{number}", "xyz"))
        plan.add(keyed(f"c{number}", "aqq"))
    seen = []
    while (group := plan.next_group()) is not None:
        assert group.num_shared == 3 * 256
        seen.append("".join(sorted(one.job_id for one in group.rows)))
        plan.abandon_group()
    assert seen == ["a0a1a2a3a4", "b0b1b2b3b4", "c0c1c2c3c4"]


def groups_of(plan: Scheduler) -> list[tuple[str, bool]]:
    """The rows of each group, and whether each is behind a prefix of its own."""
    found = []
    while (group := plan.next_group()) is not None:
        found.append((" ".join(sorted(one.job_id for one in group.rows)), group.is_apart))
        plan.abandon_group()
    return found


def test_few_rows_behind_each_of_several_prefixes_are_one_group() -> None:
    """Each is behind its own then. A row that shares nothing, or less, is in another group."""
    plan = sharing(slots=16, joined=5 * 1000)
    for name in ("a0", "b0", "c0", "a1", "b1"):
        plan.add(keyed(name, 3 * name[0]))
    plan.add(keyed("alone", "xyz"))
    plan.add(keyed("short 0", "q"))
    plan.add(keyed("short 1", "q"))
    assert groups_of(plan) == [
        ("a0 a1 b0 b1", True),
        ("alone c0", False),
        ("short 0 short 1", False),
    ]


def test_a_group_behind_several_prefixes_has_so_many_tokens_at_most() -> None:
    """Cached ones, too, and those of the longest row: all are padded to it."""
    for joined, first in (
        (4 * 778, "a0 a1 b0 b1"),
        (4 * 778 - 1, "a0 a1 b0"),
        (3 * 778 - 1, "a0 a1"),
    ):
        plan = sharing(slots=16, joined=joined)
        for name in ("a0", "b0", "a1", "b1"):
            plan.add(keyed(name, 3 * name[0], own=9 if name == "a0" else 10))
        assert groups_of(plan)[0] == (first, first != "a0 a1"), joined


def ended(name: str, keys: str, end: int, own: int = 60) -> Sequence:
    """A row of a block a letter, ``end`` tokens of the next, and ``own`` that it computes."""
    found = row(name, 256 * len(keys) + end + own)
    found.block_keys = [keys[: number + 1].encode() for number in range(len(keys))]
    ends = range(16, 256 * len(keys) + end + 1, 16)
    found.partial_keys = [f"{keys} up to {number}".encode() for number in ends]
    return found


def test_prefixes_that_end_apart_are_behind_one_group_from_a_multiple_on() -> None:
    """If more rows come so. Their last cached tokens are computed again, fewer than 64."""
    for ends, rows, starts in (
        ({"a": 48, "b": 48, "c": 48}, ["a0 a1 b0 b1 c0 c1"], [560]),
        ({"a": 48, "b": 80, "c": 96}, ["a0 a1 b0 b1 c0 c1"], [560]),
        ({"a": 48, "b": 48, "c": 16}, ["a0 a1 b0 b1 c0 c1"], [512]),
        ({"a": 48, "b": 80, "c": 16}, ["a0 a1 b0 b1", "c0 c1"], [560, 528]),
        ({"a": 48, "b": 128, "c": 128}, ["a0 a1", "b0 b1 c0 c1"], [560, 640]),
    ):
        plan = replace_chunk(sharing(slots=16, joined=10**6, prefix_cost=100), 2048)
        plan._num_cached = lambda row: 16 * len(row.partial_keys)
        for name in ("a0", "b0", "c0", "a1", "b1", "c1"):
            plan.add(ended(name, 2 * name[0], ends[name[0]]))
        found, positions = [], []
        while (group := plan.next_group()) is not None:
            found.append(" ".join(sorted(one.job_id for one in group.rows)))
            positions.append(group.position)
            plan.abandon_group()
        assert (found, positions) == (rows, starts), ends


def test_rows_that_are_not_joined_after_all_compute_nothing_again() -> None:
    """The memory has no room for copies of their prefixes. A prefix ends where they start."""
    for memory, wanted in ((10**9, ("a0 a1 c0 c1", 512, True)), (2000, ("a0 a1", 560, False))):
        plan = replace_chunk(sharing(slots=16, joined=10**6, prefix_cost=100, memory=memory), 2048)
        plan._num_cached = lambda row: 16 * len(row.partial_keys)
        for name, end in (("a0", 48), ("c0", 16), ("a1", 48), ("c1", 16)):
            plan.add(ended(name, 2 * name[0], end))
        group = plan.next_group()
        assert group is not None
        names = " ".join(sorted(one.job_id for one in group.rows))
        assert (names, group.position, group.is_apart) == wanted
        assert group.num_shared == (0 if group.is_apart else 560)


def test_rows_that_need_a_pass_of_their_own_anyway_are_not_joined_with_others() -> None:
    """Four of 32 tokens are a quarter of a chunk. More tokens than the prefix has are too many."""
    for own, joins in ((31, True), (32, False)):
        plan = sharing(slots=16, joined=10**6)
        for number in range(4):
            plan.add(keyed(f"a{number}", "aaa", own=own))
            plan.add(keyed(f"b{number}", "bbb", own=own))
        assert groups_of(plan)[0][1] is joins, own
    for long in ("b0 b1", "b1"):
        plan = sharing(slots=16, joined=10**6, prefix_cost=100)
        plan = replace_chunk(plan, 4096)
        for name in ("a0", "b0", "c0", "a1", "b1", "c1"):
            plan.add(keyed(name, name[0], own=257 if name in long else 10))
        first = groups_of(plan)[0]
        assert first[1] and not set(long.split()) & set(first[0].split()), first
    plan = replace_chunk(sharing(slots=16, joined=10**6, prefix_cost=100), 4096)
    for name in ("a0", "b0", "c0", "a1", "b1", "c1"):  # the next row is such a one
        plan.add(keyed(name, name[0], own=257 if name == "a0" else 10))
    assert groups_of(plan)[0] == ("a0 a1", False)


def replace_chunk(plan: Scheduler, tokens: int) -> Scheduler:
    """The plan with chunks of so many tokens."""
    plan.memory.budget = replace(plan.memory.budget, chunk_tokens=tokens)
    return plan


def test_rows_of_one_prefix_alone_are_not_behind_several() -> None:
    """The slots have room for no others, or the chunk has not: all are padded to the longest."""
    for slots in (1, 2, 3):
        plan = sharing(slots=slots, joined=10**6)
        for name in ("a0", "a1", "a2", "b0", "b1"):
            plan.add(keyed(name, 3 * name[0]))
        group = plan.next_group()
        assert group is not None and not group.is_apart and group.num_shared == 768
    plan = sharing(slots=16, joined=10**6)
    for name, own in (("a0", 60), ("b0", 200), ("a1", 60), ("b1", 200)):
        plan.add(keyed(name, 3 * name[0], own=own))
    group = plan.next_group()
    assert group is not None and [one.job_id for one in group.rows] == ["a0", "a1"]
    assert not group.is_apart and group.num_shared == 768


def test_a_parked_row_is_not_behind_several_prefixes() -> None:
    """It is computed already."""
    plan = sharing(slots=16, joined=10**6)
    for name in ("a0", "b0", "a1", "b1"):
        plan.add(keyed(name, 3 * name[0]))
    parked = keyed("a2", "aaa")
    parked.parked = b"row"
    plan.add(parked)
    assert groups_of(plan)[0] == ("a0 a1 b0 b1", True)


def test_rows_behind_several_prefixes_are_not_joined_without_room_for_copies() -> None:
    """Then those behind one prefix are computed after it, in place."""
    names = ("a0", "b0", "a1", "b1")
    for memory, joins in ((10**9, True), (3000, False)):
        plan = sharing(slots=16, joined=10**6, memory=memory)
        for name in names:
            plan.add(keyed(name, 3 * name[0]))
        assert groups_of(plan)[0] == (("a0 a1 b0 b1", True) if joins else ("a0 a1", False))


def test_what_prefixes_stand_on_counts_once_in_the_memory() -> None:
    costs = Costs(1)
    plan = sharing()
    leaves = [behind(plan, keys, 2) for keys in ("abc", "abde")]
    cells = plan.layouts.main.rows * plan.layouts.main.capacity
    assert plan.layouts.bytes_held(costs) == cells + 256 * (2 + 1 + 2)
    demands = [Demand(5 * 256 + 10, 10, 5 * 256)]
    before = plan.layouts.bytes_needed(
        costs, demands, prefix_keys=[b"q", b"qr", b"qrs", b"4", b"5"]
    )
    keys = [b"a", b"ab", b"abd", b"abde", b"abdef"]
    assert before - plan.layouts.bytes_needed(costs, demands, prefix_keys=keys) == 4 * 256
    assert plan.layouts.tokens_held(keys) == 4 * 256
    assert plan.layouts.tokens_held([b"a"]) == 0
    new = PrefixPart(b"abdef", 5 * 256, leaves[1])
    assert plan.layouts.tokens_held([*keys, b"abdefg"], new) == 5 * 256
    newer = PrefixPart(b"abdefgh", 7 * 256, new)
    apart = PrefixPart(b"qrstu", 5 * 256)
    chains = (None, leaves[0], new, newer, apart)
    assert [plan.layouts.bytes_of_new(costs, one) // 256 for one in chains] == [0, 0, 1, 3, 5]
    assert [plan.layouts.bytes_of_new(costs, one, new) // 256 for one in chains] == [0, 0, 0, 2, 5]
    assert plan.layouts.bytes_of_new(Costs(2, extra_per_shared=3), new) == 5 * 256


def test_a_new_prefix_needs_room_beside_buffers_that_are_larger_than_needed() -> None:
    """Long rows have left, their buffers remain, and the shared prefix is added to them."""
    costs = Costs(1)
    plan = sharing()
    for slot, length in enumerate((4000, 4000, 4000, 10)):
        plan.layouts.admit(Demand(length, 10), slot)
    for slot in range(3):
        plan.layouts.release(slot)
    demands = [Demand(4 * 256 + 10, 10, 4 * 256)]
    held = plan.layouts.bytes_held(costs)
    assert plan.layouts.bytes_needed(costs, demands) < held
    room = held + 4 * 256 + Budget(512, 0, costs).prefill_bytes(demands)
    assert Memory(plan.layouts, Budget(512, room, costs)).fits(demands)
    assert not Memory(plan.layouts, Budget(512, room - 1, costs)).fits(demands)
    behind(plan, "abcd")
    keys = [b"a", b"ab", b"abc", b"abcd"]
    room += plan.layouts.bytes_held(costs) - held - 4 * 256
    assert Memory(plan.layouts, Budget(512, room, costs)).fits(demands, None, keys)


def test_a_groups_prefix_counts_while_its_prompts_are_computed() -> None:
    """No row in a slot has it yet, but it uses memory that decoding rows must not take."""
    plan = sharing()
    for number in range(4):
        plan.add(keyed(str(number), "abcd"))
    group = plan.next_group()
    assert group is not None and group.num_shared == 4 * 256
    before = plan.memory.snapshot(group).prefill
    root = PrefixPart(b"ab", 2 * 256)
    group.share(PrefixPart(b"abcd", 4 * 256, root))
    assert group.shared_prefix is not None
    assert plan.memory.snapshot(group).prefill - before == 4 * 256
    for one, new in ((root, 2), (group.shared_prefix, 0)):  # rows take it over
        demand = Demand(one.num_tokens + 1, 1, one.num_tokens)
        plan.layouts.admit(demand, plan.layouts.num_active, one)
        assert plan.memory.snapshot(group).prefill - before == new * 256


def test_shared_tokens_count_once_in_the_memory() -> None:
    """Rows with a shared prefix need room for it once, and for their own columns."""
    costs = Costs(1)
    for count in (4, 8):
        layouts = SlotLayouts(8)
        demands = [Demand(4096 + 10, 10, 4096) for _ in range(count)]
        assert layouts.bytes_needed(costs, demands) == 4096 + count * 256
        twofold = Costs(1, extra_per_shared=2)  # prefill reads it in another form than decode does
        assert layouts.bytes_needed(twofold, demands) == 3 * 4096 + count * 256
    assert costs.prefill(4096 + 10, 4096, 99) == 10
    plan = sharing()
    for keys in ("ab", "abc", "ab"):
        behind(plan, keys)
    assert plan.layouts.bytes_needed(costs, []) == 512 + 768 + 4 * 256


def test_scheduling_knows_no_tensors() -> None:
    """No module of the room imports one that imports MLX, not even for a type."""
    folder = Path(schedule.__file__).parent
    names = {
        node.module
        for path in folder.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module
    }
    assert "batchkv_worker.kv.attention.prefix_part" in names
    code = f"import sys, {', '.join(sorted(names))}; print('mlx.core' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "False\n"
