"""Rows whose turn it is, and rows that join the slots with one copy."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from batchkv_worker.engine.engine import Engine, EngineConfig
from batchkv_worker.engine.schedule.policy import (
    MOST_OVERTAKEN,
    free_slots,
    in_turn,
    most_alike,
    next_row,
    steps_left,
)
from batchkv_worker.engine.schedule.scheduler import Budget, PrefillGroup, Scheduler
from batchkv_worker.events import Completed
from batchkv_worker.kv.backends.generic import GenericBackend
from batchkv_worker.kv.slots.changes import Arrival, Arrivals, Demand
from batchkv_worker.kv.slots.layouts import Costs, SlotLayouts
from batchkv_worker.sequence import Generation, Sequence
from support import tiny_models


def row(name: str, length: int, max_tokens: int = 10) -> Sequence:
    return Sequence(name, list(range(length + 1)), Generation(max_tokens))


def scheduler(slots: int = 4) -> Scheduler:
    return Scheduler(SlotLayouts(slots), Budget(512, 10**9, Costs(1)))


def computed(plan: Scheduler) -> list[str]:
    """Form the next group and take it as computed."""
    group = plan.next_group()
    if group is None:
        return []
    group.advance(group.width)
    return [row.job_id for row in plan.finish_group()]


@pytest.mark.few(2)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
@pytest.mark.parametrize("scheme", ["float", "turbo4"])
def test_rows_that_join_with_one_copy_are_as_if_they_joined_alone(
    family: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of similar and of equal length: the same tokens, and fewer copies than rows."""
    rng = random.Random(3)
    model, runs = tiny_models.build(family), Arrivals.runs
    prompts = [
        [rng.randrange(tiny_models.VOCABULARY) for _ in range(length)]
        for length in (40, 40, 40, 40, 41, 41, 300, 300, 1, 1, 40, 40)
    ]
    seen: list[dict[str, Any]] = []
    num_copies = []
    for together in (True, False):
        copies = 0

        def counted(rows: Arrivals) -> Iterator[tuple[Arrival, int]]:
            nonlocal copies
            for found in runs(rows):
                copies += 1
                yield found

        config = EngineConfig(
            scheme=scheme,
            slots=8,
            chunk_tokens=256,
            memory_bytes=2**30,
            path="fused",
            group_cost=64,
            prefix_cells=64,
            backend=tiny_models.measured(model, scheme, 8, "fused"),
        )
        running = Engine(tiny_models.loaded(model), config)
        with monkeypatch.context() as patch:
            patch.setattr(Arrivals, "runs", counted)
            if not together:
                patch.setattr(Arrival, "is_followed_by", lambda one, other: False)
            for index, prompt in enumerate(prompts):
                generation = Generation(3 + index, temperature=0.0)
                running.submit_row(Sequence(str(index), prompt, generation))
            ended = {}
            while not running.is_idle:
                for event in running.step():
                    assert isinstance(event, Completed)
                    ended[event.job_id] = tuple(event.token_ids)
                running.check_integrity()
            running.close()
        seen.append(ended)
        num_copies.append(copies)
    assert seen[0] == seen[1] and len(seen[0]) == len(prompts)
    assert 0 < num_copies[0] < num_copies[1]


def test_the_longest_answers_come_first_and_nobody_starves() -> None:
    """A row that may generate much starts early; a row that others overtake starts in time."""
    plan = scheduler(slots=1)
    plan.add(row("short", 600, 1))
    plan.add(row("long", 600, 500))
    assert computed(plan) == ["long"]
    for index in range(MOST_OVERTAKEN + 2):
        plan.add(row(f"later{index}", 600, 400))
    order = ["long"]
    while "short" not in order:
        order += computed(plan)
    assert 2 <= len(order) <= MOST_OVERTAKEN + 2


def test_rows_of_one_length_in_neighbouring_slots_are_one_copy() -> None:
    """Runs end where length, shared prefix, place or slot differs; an empty row is alone."""
    lengths = (5, 5, 5, 7, 7, 0, 0)
    rows = [Arrival(slot, slot, length) for slot, length in enumerate(lengths)]
    found = [(row.slot, count) for row, count in Arrivals(rows[::-1]).runs()]
    assert found == [(0, 3), (3, 2), (5, 1), (6, 1)]
    rows[1] = Arrival(20, 1, 5)
    found = [(row.slot, count) for row, count in Arrivals(rows).runs()]
    assert found == [(0, 1), (2, 1), (3, 2), (5, 1), (6, 1), (20, 1)]
    # Another slot lies between them; or another row of the group, which has no slot.
    for other in (Arrival(5, 1, 5), Arrival(1, 2, 5), Arrival(1, 1, 5, 2)):
        assert len([*Arrivals([Arrival(0, 0, 5), other]).runs()]) == 2


def test_short_answers_wait_for_more_slots() -> None:
    """The number at which waiting and chunks cost least together, within limits."""
    assert free_slots(32, 0.0, 10, 32) == 2 and free_slots(8, 0.0, 10, 32) == 1
    assert free_slots(32, 2.0, 500, 32) == 2 and free_slots(32, 2.0, 64, 32) == 6
    assert free_slots(32, 2.0, 1, 32) == 8 and free_slots(1, 2.0, 1, 32) == 1
    # A chunk that is full with fewer rows waits for no more slots.
    assert free_slots(32, 2.0, 64, 4) == 4 and free_slots(32, 2.0, 64, 0) == 1

    def cost(count: int, steps: float, answer: float) -> float:
        """Decode steps a row, by counting: half of ``count`` slots wait, and a chunk costs."""
        return answer / 32 * (1 + count / 64) + steps / count

    for steps, answer in ((2.0, 64), (2.0, 128), (0.5, 64)):
        least = min(cost(count, steps, answer) for count in range(1, 33))
        assert cost(free_slots(32, steps, answer, 32), steps, answer) < 1.03 * least


def test_answers_that_ended_say_how_many_slots_are_waited_for() -> None:
    """Before that it is what the next row may generate."""
    layouts = SlotLayouts(32)
    plan = Scheduler(layouts, Budget(512, 10**9, Costs(1), chunk_steps=2.0))
    for slot in range(28):
        layouts.admit(Demand(10, 10), slot)
    plan.add(row("next", 10, 2000))
    for index in range(20):
        plan.add(row(str(index), 10, 2000))
    assert plan.next_group() is not None
    plan.abandon_group()
    for _ in range(16):
        plan.note_completed(32)
    assert plan.next_group() is None  # 8 are waited for, and 4 are free
    layouts.release(0)
    for slot in range(1, 4):
        layouts.release(slot)
    assert plan.next_group() is not None


def test_rows_that_begin_together_wait_for_fewer_slots() -> None:
    """None of them ends soon, so a free slot is free for a whole answer."""
    assert free_slots(64, 2.0, 32, 64) == 16
    assert free_slots(64, 2.0, 32, 64, is_decoding=False) == 4  # of 32 steps: 2 are lost, or more
    assert free_slots(64, 2.0, 16, 64, is_decoding=False) == 8
    assert free_slots(64, 2.0, 1, 64, is_decoding=False) == 16  # never more than others
    assert free_slots(64, 0.0, 64, 64, is_decoding=False) == 1  # a pass in any case
    assert free_slots(64, 0.0, 32, 64, is_decoding=False) == 2
    plan = decoding(27, 32)
    for index in range(20):
        plan.add(row(str(index), 10, 2000))
    assert plan.next_group() is None  # 8 are waited for
    assert names_of(plan.next_group(is_decoding=False)) == ["0", "1", "2", "3", "4"]
    plan = decoding(31, 32)
    for index in range(20):
        plan.add(row(str(index), 10, 2000))
    assert plan.next_group(is_decoding=False) is None  # one is not worth a chunk, two are


@pytest.mark.parametrize(("before", "expected"), [(7, 7), (20, 8)])
def test_an_engine_fills_its_slots_before_it_decodes(before: int, expected: int) -> None:
    """Chunks hold seven rows. An eighth comes in before the first step, and not after it."""
    backend = GenericBackend(chunk_steps=2.0)
    config = EngineConfig(slots=8, chunk_tokens=512, memory_bytes=2**26, backend=backend)
    running = Engine(tiny_models.loaded(tiny_models.build("llama")), config)
    rng = random.Random(5)
    prompts = [[rng.randrange(tiny_models.VOCABULARY) for _ in range(71)] for _ in range(20)]
    rows = [
        Sequence(str(index), prompt, Generation(20, temperature=0.0))
        for index, prompt in enumerate(prompts)
    ]
    for given in (rows[:before], rows[before:]):
        for one in given:
            running.submit_row(one)
        running.step()
        assert running.progress().num_decode == expected
    running.close()


def test_a_row_that_was_begun_goes_before_longer_ones() -> None:
    """A row that was preempted is not overtaken by rows that may generate more."""
    begun, long = row("begun", 5, 1), row("long", 5, 500)
    assert in_turn([begun, long], 100) == [long, begun] and begun.num_overtaken == 1
    begun.num_preempted = 1
    assert in_turn([begun, long], 100) == [begun, long] and begun.num_overtaken == 1


def test_the_oldest_row_is_next_while_much_is_left() -> None:
    """A long answer overtakes it only when that would end last, waiting rows and others counted."""
    rows = [row("old", 5, 10), row("long", 5, 100), row("new", 5, 10)]
    assert steps_left(rows, 280, 4) == 100
    assert next_row(rows, 100) is rows[1] and next_row(rows, 124) is rows[1]
    assert next_row(rows, 126) is rows[0]
    assert in_turn(rows, 126) == rows and rows[0].num_overtaken == 0
    rows[0].num_overtaken = MOST_OVERTAKEN
    assert next_row(rows, 100) is rows[0]


def test_prompts_of_like_length_are_computed_together() -> None:
    """The first is in the chunk in any case; an urgent row comes earlier than its length says."""
    first, near, far = row("first", 100), row("near", 130), row("far", 200)
    for max_tokens, place in ((10, 2), (89, 2), (92, 1)):  # 12 too many: 24 pads are accepted
        late = row("late", 150, max_tokens)
        found = most_alike([first, far, late, near], 100)
        assert found.index(late) == place
        assert [one for one in found if one is not late] == [first, near, far]


def decoding(num_rows: int, slots: int, coming: int = 1000, **options: Any) -> Scheduler:
    """A scheduler of which so many slots have rows that may generate so much more."""
    layouts = SlotLayouts(slots)
    budget = Budget(512, 10**9, Costs(1), chunk_steps=2.0)
    plan = Scheduler(layouts, budget, **options)
    for slot in range(num_rows):
        layouts.admit(Demand(10, coming), slot)
    for _ in range(16):
        plan.note_completed(32)
    return plan


def names_of(group: PrefillGroup | None) -> list[str]:
    return [] if group is None else [one.job_id for one in group.rows]


def test_a_scheduler_knows_what_is_left() -> None:
    """Rows in slots count: with them much is left, and the oldest is next; without, the longest."""
    for coming, expected in ((2000, "old"), (600, "long"), (10, "long")):
        plan = decoding(4, 8, coming)
        plan.layouts.after_step()
        assert plan.layouts.main.num_remaining == 4 * coming - 4
        for one in (row("old", 400, 10), row("long", 500, 300), row("other", 90, 10)):
            plan.add(one)
        assert names_of(plan.next_group()) == [expected]


def test_urgent_rows_join_before_others_and_cut_no_chunk() -> None:
    """Of prompts as unlike, the longer answer comes first; one that does not fit is left out."""
    plan = decoding(0, 8)
    rows = [("first", 100, 100), ("a", 140, 10), ("late", 140, 100), ("b", 140, 10)]
    for name, length, answer in [*rows, ("wide", 400, 100), ("c", 100, 10)]:
        plan.add(row(name, length, answer))
    assert names_of(plan.next_group()) == ["first", "late", "c"]


def test_a_chunk_that_is_full_waits_for_no_more_slots() -> None:
    """Prompts of 300 tokens fill a chunk of 512 alone: one free slot is enough, and 8 for short."""
    for length, num_free, is_enough in ((300, 1, True), (20, 7, False), (20, 8, True)):
        plan = decoding(32 - num_free, 32)
        for index in range(40):
            plan.add(row(str(index), length, 40))
        assert bool(plan.next_group()) == is_enough


def test_what_a_chunk_holds_depends_on_what_is_computed() -> None:
    """Cached tokens do not count. While live rows come, chunks are smaller, and a slot is kept."""
    for length, cached, lane, num_free, is_enough in (
        (300, 280, 0, 1, False),
        (300, 0, 0, 1, True),
        (300, 0, 256, 1, False),  # that slot is kept
        (300, 0, 256, 2, True),
        (120, 0, 0, 3, False),  # four fill a chunk
        (120, 0, 256, 3, True),  # two fill a smaller one
    ):
        plan = decoding(32 - num_free, 32, num_cached=lambda _, cached=cached: cached)
        plan.use_lane(lane)
        for index in range(40):
            plan.add(row(str(index), length, 40))
        assert bool(plan.next_group()) == is_enough
    plan = decoding(28, 32)
    plan.use_lane(256)
    for index in range(4):
        plan.add(row(str(index), 20, 40))
    assert plan.next_group() is None  # three may come in, and a fourth waits
    plan.layouts.release(0)
    assert len(names_of(plan.next_group())) == 4


def test_rows_that_are_not_ready_decide_nothing() -> None:
    """The oldest waits for its prefix: its long prompt is no reason to compute one short one."""
    ready = False
    plan = decoding(31, 32, is_ready=lambda one: ready or one.job_id != "0")
    for index in range(40):
        plan.add(row(str(index), 20 if index else 500, 40))
    assert plan.next_group() is None
    ready = True
    plan.cancel("39")  # it looks again where something has changed
    assert names_of(plan.next_group()) == ["0"]


def test_what_stood_in_a_slot_before_does_no_harm() -> None:
    """Not even NaN: a weight of 0 times NaN would be NaN, too."""
    model = tiny_models.build("llama")
    config = EngineConfig(scheme="float", slots=4, chunk_tokens=256, memory_bytes=2**30)
    running = Engine(tiny_models.loaded(model), config)
    for index in range(4):
        prompt = [index + 1] * 60
        running.submit_row(Sequence(str(index), prompt, Generation(40, temperature=0.0)))
    for _ in range(4):
        running.step()
    for index in (1, 2, 3):
        running.cancel(str(index))
    free = [slot for slot in range(4) if slot not in running._rows]
    assert len(free) == 3
    for array in running._slots.arrays:
        for slot in free:
            array[slot] = float("nan")
    prompt = [7, 8, 9, 10]
    running.submit_row(Sequence("new", prompt, Generation(8, temperature=0.0)))
    found = {}
    while not running.is_idle:
        for event in running.step():
            assert isinstance(event, Completed)
            found[event.job_id] = list(event.token_ids)
    assert found["new"] == tiny_models.alone(model, prompt, 8)
