"""Rows with several choices: the same tokens as rows with their seeds, whatever happens meanwhile.

The tiny models sample from random weights, so that each seed gives other tokens.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from batchkv_producer.wire.choice import Choice
from batchkv_producer.wire.job import ErrorCode, Request, SamplingParams
from batchkv_worker.engine.engine import Engine, EngineConfig
from batchkv_worker.engine.prefill import Prefill
from batchkv_worker.engine.schedule.admission import FEWEST_OUTPUTS
from batchkv_worker.engine.tokens import outputs
from batchkv_worker.events import Completed, Event, Rejected, Work
from batchkv_worker.kv.layers.decode import DecodeSlots
from batchkv_worker.prefix.memory import PrefixCache
from batchkv_worker.sequence import Generation, Sequence
from support import tiny_models
from worker.kv.crowd import model_of, random_prompt

LENGTHS = (1, 700)
SEED = 2**64 - 3  # the fourth choice begins at 0 again
SAMPLED = Generation(12, temperature=1.0, top_k=8, seed=SEED)


def engine(family: str = "llama", **changes: Any) -> Engine:
    values: dict[str, Any] = {"slots": 6, "chunk_tokens": 256, "path": "fused"}
    values |= {"scheme": "float", "memory_bytes": 2**27, "prefix_cells": 0, **changes}
    model = model_of(family)
    config = tiny_models.with_measured(model, EngineConfig(**values))
    return Engine(tiny_models.loaded(model), config)


def row(job_id: str, length: int = 40, generation: Generation = SAMPLED) -> Sequence:
    return Sequence(job_id, random_prompt(length, length), generation)


def drain(running: Engine, steps: int = 5000) -> list[Event]:
    """All events up to the end, or of so many steps."""
    ended: list[Event] = []
    for _ in range(steps):
        if running.is_idle:
            break
        ended += running.step()
        running.check_integrity()
    return ended


def answers(event: Event) -> list[Choice]:
    assert isinstance(event, Completed)
    return [Choice(event.text, event.finish_reason, event.logprobs), *event.more]


@cache
def of_rows(
    length: int, count: int, generation: Generation = SAMPLED, slots: int = 8
) -> list[Choice]:
    """The answers of rows with the seeds of the choices; one after the other in one slot."""
    running = engine(slots=slots)
    for number in range(count):
        seeded = replace(generation, seed=(generation.seed + number) % 2**64)
        running.submit_row(row(str(number), length, seeded))
    ended = {event.job_id: event for event in drain(running)}
    return [one for number in range(count) for one in answers(ended[str(number)])]


def num_computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Prompt tokens that prefill computes from now on, by chunk."""
    counts: list[int] = []
    compute = Prefill._compute_chunk

    def counted(self: Prefill, group: Any) -> None:
        before = group.position
        compute(self, group)
        counts.append(len(group.rows) * (group.position - before))

    monkeypatch.setattr(Prefill, "_compute_chunk", counted)
    return counts


@pytest.mark.parametrize("length", LENGTHS)
def test_choices_equal_rows_with_their_seeds(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight choices in six slots have the tokens of eight rows; the prompt is computed once."""
    generation = replace(SAMPLED, logprobs=1)
    expected = of_rows(length, 8, generation, slots=1)
    assert len({one.text for one in expected}) == 8
    running, computed = engine(), num_computed(monkeypatch)
    running.submit_row(row("a", length, generation), 8)
    [event] = drain(running)
    assert isinstance(event, Completed) and event.job_id == "a"
    for choice, alone in zip(answers(event), expected, strict=True):
        assert (choice.text, choice.finish_reason) == (alone.text, alone.finish_reason)
        assert [one.logprob for one in choice.logprobs or ()] == pytest.approx(
            [one.logprob for one in alone.logprobs or ()], abs=1e-3
        )
    assert (event.usage.prompt, event.usage.completion) == (length, 8 * 12)
    assert event.usage.cached == 0
    assert sum(computed) == length - 1  # the first step takes the last one


def test_choices_among_other_rows() -> None:
    """Windows and states: choices that join and leave beside other rows, and those rows, too."""
    family = "gear"  # a window, states, and a layer that keeps all
    expected: dict[str, list[Choice]] = {}
    jobs = {"a": (300, 5), "b": (40, 1), "c": (270, 3), "d": (3, 4)}
    alone = engine(family)
    for job_id, (length, count) in jobs.items():
        alone.submit_row(row(job_id, length), count)
        expected[job_id] = answers(*drain(alone))
    running = engine(family, slots=4)
    ended: list[Event] = []
    for job_id, (length, count) in jobs.items():
        running.submit_row(row(job_id, length), count)
        ended += drain(running, 3)
    ended += drain(running)
    found = {event.job_id: answers(event) for event in ended if isinstance(event, Completed)}
    assert {job_id: [one.text for one in each] for job_id, each in found.items()} == {
        job_id: [one.text for one in each] for job_id, each in expected.items()
    }


def test_128_choices_in_four_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """They run in turns after one prompt, which is computed once; the report counts them."""
    generation = replace(SAMPLED, max_tokens=3, stop=("never",))
    running, computed = engine(slots=4), num_computed(monkeypatch)
    one = row("a", 270, generation)
    one.detokenizer = tiny_models.NumberTokenizer().detokenizer
    running.submit_row(one, 128)
    assert drain(running, 6) == []
    assert "of 128 choices are to come; " in running.report()
    [event] = drain(running)
    found = answers(event)
    assert len(found) == 128 and isinstance(event, Completed)
    assert event.usage.completion == sum(len(choice.text.split()) for choice in found)
    assert sum(computed) == 269
    expected = of_rows(270, 3, replace(generation, stop=()))
    assert [choice.text for choice in found[:3]] == [choice.text for choice in expected]
    assert "choices" not in running.report()
    assert running.prefixes.num_bytes <= running.prefixes.max_bytes
    assert not any(key.startswith(b"row ") for key in running.prefixes._blocks)  # none is parked


def test_choices_share_the_prompt_in_their_slots() -> None:
    """Up to where a shared prefix may end, it is stored once for all choices that decode."""
    running = engine()
    running.submit_row(row("a", 700), 6)
    most = 0
    while not running.is_idle:
        running.step()
        prefixes = running._slots.layouts.prefixes
        most = max(most, len(prefixes))
        assert len(set(prefixes.values())) <= 1
    assert most == 6


@pytest.mark.parametrize("prefix_bytes", [0, 2**22])
def test_choices_that_leave_their_slots_come_back(prefix_bytes: int) -> None:
    """Memory for some of them: they are preempted, and have the tokens that they have without.

    Without memory for prefixes nothing is parked, so the choices compute their prompt again.
    """
    generation = replace(SAMPLED, max_tokens=110)
    expected = of_rows(200, 6, generation)
    probe = engine(prefix_bytes=prefix_bytes)
    costs = probe.plan.costs
    memory_bytes = prefix_bytes + 2000 * (costs.per_token + costs.largest) + 6 * costs.per_row
    running = engine(prefix_bytes=prefix_bytes, memory_bytes=memory_bytes, share=False)
    for _ in range(FEWEST_OUTPUTS):
        running._scheduler.output_lengths.add(8)
    running.submit_row(row("a", 200, generation), 6)
    [event] = drain(running)
    assert running._decode_rows.num_preempted >= 2
    assert [one.text for one in answers(event)] == [one.text for one in expected]


def test_memory_for_one_choice_at_a_time() -> None:
    """Where two choices do not fit together they run one after the other."""
    expected = of_rows(300, 3)
    probe = engine(prefix_bytes=0, share=False, slots=3)
    costs = probe.plan.costs
    memory_bytes = 1300 * (costs.per_token + costs.largest) + 3 * costs.per_row
    running = engine(
        prefix_bytes=0, share=False, slots=3, memory_bytes=memory_bytes, admission="worst"
    )
    running.submit_row(row("a", 300), 3)
    ended: list[Event] = []
    while not running.is_idle:
        ended += running.step()
        running.check_integrity()
        assert len(running._rows) <= 1
        assert running.kv_bytes <= memory_bytes
    assert [one.text for one in answers(*ended)] == [one.text for one in expected]


def test_a_parked_prompt_that_is_evicted_is_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Choices whose parked prompt is gone compute it, from the blocks that are left."""
    expected = of_rows(300, 8)
    running = engine(slots=2)
    running.submit_row(row("a", 300), 8)
    assert drain(running, 4) == []
    running.prefixes.clear()
    [event] = drain(running)
    assert [one.text for one in answers(event)] == [one.text for one in expected]


@pytest.mark.parametrize("steps", [1, 20])
def test_a_cancel_ends_all_choices(steps: int) -> None:
    """Before, in and after the prompt, and when some have ended: nothing follows, all is free."""
    running = engine(slots=3)
    running.submit_row(row("other", 30))
    running.submit_row(row("a", 600), 8)
    ended = drain(running, steps)
    running.cancel("a")
    running.check_integrity()
    ended += drain(running)
    assert [event.job_id for event in ended] == ["other"]
    assert not running._rows and not running._scheduler.num_waiting
    assert not any(key.startswith(b"row ") for key in running.prefixes._blocks)
    running.submit_row(row("a", 600), 3)  # the id may come again
    [event] = drain(running)
    assert [one.text for one in answers(event)] == [one.text for one in of_rows(600, 3)]


def test_a_recall_takes_rows_that_are_not_begun() -> None:
    """A row with a choice in a slot stays. The count is of choices; a row is recalled whole."""
    running = engine(slots=1)
    for job_id, count in (("a", 4), ("b", 4), ("c", 2), ("d", 1)):
        running.submit_row(row(job_id, 40), count)
    assert running.recall(["a", "b", "c", "d"], 2) == ["d"]
    assert drain(running, 3) == []
    assert running.recall(["a", "b", "c"], 5) == ["c"]
    assert running.recall(["a", "b"], 99) == ["b"]
    running.check_integrity()
    [event] = drain(running)
    assert event.job_id == "a" and len(answers(event)) == 4


def test_a_row_that_was_begun_and_waits_again_is_not_recalled() -> None:
    running = engine(slots=1)
    for job_id in ("a", "b"):
        running.submit_row(row(job_id, 40), 1)
    begun = running._scheduler.waiting[0]
    begun.num_failures = 1
    assert running.recall(["a", "b"], 9) == ["b"]


def test_one_choice_that_fails_fails_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row has one error with its code; its other choices end, other rows go on."""
    take = outputs.take

    def broken(one: Sequence, *rest: Any) -> Any:
        if one.choice == 2 and len(one.generated) == 3:
            raise ValueError("broken")
        return take(one, *rest)

    monkeypatch.setattr(outputs, "take", broken)
    running = engine(slots=4)
    running.submit_row(row("a", 30), 6)
    running.submit_row(row("b", 30))
    ended = drain(running)
    assert ended[0] == Rejected("a", ErrorCode.ENGINE_ERROR, "ValueError")
    assert [event.job_id for event in ended] == ["a", "b"]


def test_memory_that_runs_out_costs_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps and parking that fail: every choice is computed again and has its tokens."""
    expected = of_rows(300, 8)
    fault = RuntimeError("[malloc] Unable to allocate 68719476736 bytes.")
    end_step, park, calls = DecodeSlots.end_step, PrefixCache.park, {"step": 0, "park": 0}

    def count(name: str, at: set[int]) -> None:
        calls[name] += 1
        if calls[name] in at:
            raise fault

    def failing_step(self: DecodeSlots) -> None:
        count("step", {9, 25})
        end_step(self)

    def failing_park(self: PrefixCache, *rest: Any) -> None:
        count("park", {1})
        park(self, *rest)

    running = engine(slots=4)
    monkeypatch.setattr(DecodeSlots, "end_step", failing_step)
    monkeypatch.setattr(PrefixCache, "park", failing_park)
    running.submit_row(row("b", 700, replace(SAMPLED, max_tokens=60)))
    running.submit_row(row("a", 300), 8)
    ended = {event.job_id: event for event in drain(running)}
    assert running._recovery.num_out_of_memory == 3
    assert [one.text for one in answers(ended["a"])] == [one.text for one in expected]


def test_choices_are_audited_one_by_one() -> None:
    """A choice that used a cached prompt is computed again without it; its row ends once."""
    running = engine(audit=1.0)
    running.submit_row(row("first", 600))
    running.submit_row(row("a", 600), 4)
    assert sorted(event.job_id for event in drain(running)) == ["a", "first"]
    assert running._ends.audit.num_audited >= 4 and not running._ends.audit.num_differing


@pytest.mark.parametrize(("temperature", "num_steps"), [(0.0, 1), (1.0, 3)])
def test_greedy_choices_are_computed_once(temperature: float, num_steps: int) -> None:
    """At temperature 0 the one choice is repeated, and counted as often; else all are computed."""
    params = SamplingParams(max_tokens=4, temperature=temperature, seed=1, n=3)
    work = Work("a", Request("a", "completion", prompt="1 2 3", params=params))
    running = engine(slots=1)
    running.add(work)
    assert work.num_choices == num_steps
    assert running._scheduler.num_waiting == 1
    [event] = drain(running)
    assert isinstance(event, Completed) and event.usage.completion == 3 * 4
    texts = [one.text for one in answers(event)]
    assert len(texts) == 3 and len(set(texts)) == num_steps
