"""Rows whose turn it is, and rows that join the slots with one copy."""

from __future__ import annotations

import random
from typing import Any

import pytest

from batchkv_worker.engine.engine import Engine, EngineConfig
from batchkv_worker.engine.schedule.policy import MOST_OVERTAKEN, longest_first
from batchkv_worker.engine.schedule.scheduler import Budget, Scheduler
from batchkv_worker.engine.slot_insert import Placement, runs
from batchkv_worker.events import Completed
from batchkv_worker.kv.layers.decode import DecodeSlots
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


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
@pytest.mark.parametrize("scheme", ["float", "turbo4"])
def test_rows_that_join_with_one_copy_are_as_if_they_joined_alone(
    family: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of similar and of equal length: the same tokens, and fewer copies than rows."""
    rng = random.Random(3)
    model = tiny_models.build(family)
    prompts = [
        [rng.randrange(tiny_models.VOCABULARY) for _ in range(length)]
        for length in (40, 40, 40, 40, 41, 41, 300, 300, 1, 1, 40, 40)
    ]
    fill = DecodeSlots.fill
    seen: list[dict[str, Any]] = []
    num_copies = []
    for together in (True, False):
        copies = []

        def counted(slots: DecodeSlots, slot: int, pieces: Any, copies: Any = copies) -> None:
            copies.append(slot)
            fill(slots, slot, pieces)

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
            patch.setattr(DecodeSlots, "fill", counted)
            if not together:
                patch.setattr(Placement, "is_followed_by", lambda one, other: False)
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
        num_copies.append(len(copies))
    assert seen[0] == seen[1] and len(seen[0]) == len(prompts)
    assert num_copies[0] < num_copies[1] == len(prompts)


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
    rows = [row(str(i), n) for i, n in enumerate((5, 5, 5, 7, 7, 0, 0))]
    for slot, one in enumerate(rows):
        one.slot = slot
    placed = [Placement(one, place, 0) for place, one in enumerate(rows)]
    lengths = [[one.row.num_prefill for one in run] for run in runs(placed[::-1])]
    assert lengths == [[5, 5, 5], [7, 7], [0], [0]]
    rows[1].slot = 20
    lengths = [[one.slot for one in run] for run in runs(placed)]
    assert lengths == [[0], [2], [3, 4], [5], [6], [20]]
    pair = [row("a", 5), row("b", 5)]
    for one, slot in zip(pair, (0, 5), strict=True):
        one.slot = slot
    assert [len(run) for run in runs([Placement(o, n, 0) for n, o in enumerate(pair)])] == [1, 1]
    pair[1].slot = 1  # but there is one between them in the group, which has no slot
    assert [len(run) for run in runs([Placement(pair[0], 0, 0), Placement(pair[1], 2, 0)])] == [
        1,
        1,
    ]


def test_a_row_that_was_begun_goes_before_longer_ones() -> None:
    """A row that was preempted is not overtaken by rows that may generate more."""
    begun, long = row("begun", 5, 1), row("long", 5, 500)
    assert longest_first([begun, long], 4) == [long, begun]
    begun.num_preempted = 1
    assert longest_first([begun, long], 4) == [begun, long]


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
