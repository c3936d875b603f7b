"""Memory that runs out although the budget is kept: rows that are computed again, or end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from batchkv_producer.wire.job import ErrorCode
from batchkv_worker.engine.engine import Engine, EngineConfig
from batchkv_worker.engine.prefill import Prefill
from batchkv_worker.engine.tokens import outputs as answers
from batchkv_worker.events import Completed, Rejected
from batchkv_worker.faults import is_at_once, is_out_of_memory
from batchkv_worker.kv.layers.attention_slots import AttentionSlots
from batchkv_worker.kv.layers.decode import DecodeSlots
from batchkv_worker.sequence import Generation, Sequence
from support import tiny_models
from worker.kv.crowd import model_of, random_prompt

# What MLX raises: Metal and CUDA where memory is asked for, and Metal when a command buffer ends.
ASKED = RuntimeError("[malloc] Unable to allocate 68719476736 bytes.")
LATER = RuntimeError(
    "[METAL] Command buffer execution failed: Insufficient Memory "
    "(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)"
)


def engine(family: str) -> Engine:
    config = EngineConfig("float", slots=4, chunk_tokens=256, memory_bytes=2**27, path="fused")
    model = model_of(family)
    return Engine(tiny_models.loaded(model), tiny_models.with_measured(model, config))


def submit(running: Engine, count: int = 6) -> None:
    """Greedy rows, and rows that sample and look back at what they have generated."""
    looks_back: dict[str, Any] = {
        **{"repetition_penalty": 1.2, "frequency_penalty": 0.5, "bad_words": ((1, 2, 3), (4, 5))},
        "logit_bias": tuple((token, 4.0) for token in range(6)),
    }
    for index in range(count):
        greedy: dict[str, Any] = {"temperature": 0.0}
        asked = {"temperature": 0.9, "seed": index, **looks_back} if index % 2 else greedy
        prompt = random_prompt(index, 20 + 90 * index)
        running.submit_row(Sequence(str(index), prompt, Generation(40 - 3 * index, **asked)))


def drain(running: Engine) -> dict[str, Any]:
    ended: dict[str, Any] = {}
    for _ in range(2000):
        if running.is_idle:
            return ended
        for event in running.step():
            assert isinstance(event, Completed | Rejected)
            assert event.job_id not in ended
            ended[event.job_id] = event
        running.check_integrity()
    raise AssertionError("the engine never becomes idle")


def failing(call: Callable[..., Any], at: set[int], fault: Exception) -> Callable[..., Any]:
    """Raises instead of making its n-th calls, as an allocation would in the middle of them."""
    made = [0]

    def wrapped(*args: Any, **options: Any) -> Any:
        made[0] += 1
        if made[0] in at:
            raise fault
        return call(*args, **options)

    return wrapped


PLACES: dict[str, tuple[Any, str, set[int]]] = {
    "a chunk of a prompt": (Prefill, "_compute_chunk", {3, 4}),
    "a row that joins": (AttentionSlots, "admit", {4, 9}),
    "a buffer that grows": (AttentionSlots, "relayout", {4, 8}),
    "a decode step's graph": (AttentionSlots, "update_and_fetch", {7, 40}),
    "a decode step": (DecodeSlots, "end_step", {5, 11, 12}),
}


@pytest.mark.parametrize("place", PLACES)
def test_rows_go_on_token_for_token(place: str) -> None:
    """Wherever memory runs out: every row ends with the tokens that it has without the fault."""
    owner, name, at = PLACES[place]
    number = list(PLACES).index(place)
    family, fault = ("llama", "gear")[number % 2], (ASKED, LATER)[number // 2 % 2]
    calm = engine(family)
    submit(calm)
    expected = drain(calm)
    running = engine(family)
    submit(running)
    before = running._scheduler.budget.memory_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, failing(getattr(owner, name), at, fault))
        got = drain(running)
    assert running._recovery.num_out_of_memory == len(at)
    assert running._scheduler.budget.memory_bytes < before
    for job_id, event in expected.items():
        assert got[job_id].token_ids == event.token_ids, job_id
        assert got[job_id].usage == event.usage


def test_rows_that_decode_go_on_when_a_prompt_finds_no_memory() -> None:
    """Their buffers do not change: only the prompt is computed again."""
    running = engine("llama")
    submit(running, 2)
    running.step()
    decoding = dict(running._rows)
    assert decoding
    running.submit_row(Sequence("late", random_prompt(9, 300), Generation(3, temperature=0.0)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Prefill, "_compute_chunk", failing(Prefill._compute_chunk, {1}, ASKED))
        while not running._recovery.num_out_of_memory:
            running.step()
        assert all(row.num_resumed == 0 and row.slot is not None for row in decoding.values())
        assert set(drain(running)) >= {"late"}


def test_a_last_token_that_is_lost_is_computed_again() -> None:
    """A row whose slot is free since its last token is on its way is not forgotten."""
    calm, running = engine("llama"), engine("llama")
    for each in (calm, running):
        submit(each)
    expected = drain(calm)
    read_back, failed = answers.read_back, []

    def wrapped(sampled: Any) -> Any:
        step = running._in_flight
        assert step is not None
        if len(failed) < 2 and any(row and not row.num_remaining for row in step.rows):
            failed.append(sampled)
            raise LATER
        return read_back(sampled)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answers, "read_back", wrapped)
        got = drain(running)
    assert len(failed) == 2
    assert {key: event.token_ids for key, event in got.items()} == {
        key: event.token_ids for key, event in expected.items()
    }


def test_a_row_that_is_too_much_alone_ends_and_the_others_go_on() -> None:
    """Memory that runs out twice for a row alone ends it, with a code of its own."""
    running = engine("llama")
    submit(running, 3)
    running.submit_row(Sequence("big", random_prompt(9, 900), Generation(3, temperature=0.0)))
    compute = Prefill._compute_chunk

    def wrapped(self: Prefill, group: Any) -> None:
        if any(row.job_id == "big" for row in group.rows):
            raise ASKED
        compute(self, group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Prefill, "_compute_chunk", wrapped)
        ended = drain(running)
    assert isinstance(ended["big"], Rejected) and ended["big"].code == ErrorCode.OUT_OF_MEMORY
    assert all(isinstance(ended[str(index)], Completed) for index in range(3))
    running.submit_row(Sequence("after", [1, 2, 3], Generation(3, temperature=0.0)))
    assert isinstance(drain(running)["after"], Completed)


def test_memory_is_allowed_again_as_rows_end() -> None:
    """A worker is as fast as before once memory suffices again."""
    running = engine("llama")
    allowed = running._scheduler.budget.memory_bytes
    submit(running)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecodeSlots, "end_step", failing(DecodeSlots.end_step, {5}, ASKED))
        drain(running)
    shrunk = running._scheduler.budget.memory_bytes
    assert shrunk < allowed
    for _ in range(256):
        running._scheduler.memory.relax()
    assert running._scheduler.budget.memory_bytes == allowed


def test_other_faults_are_not_taken_for_it() -> None:
    """A fault of the program is still the engine's end."""
    assert is_out_of_memory(ASKED) and is_out_of_memory(LATER) and is_out_of_memory(MemoryError())
    assert is_at_once(ASKED) and not is_at_once(LATER)
    running = engine("llama")
    submit(running)
    with pytest.MonkeyPatch.context() as patch:
        broken = failing(DecodeSlots.end_step, {2}, RuntimeError("[matmul] shapes differ"))
        patch.setattr(DecodeSlots, "end_step", broken)
        with pytest.raises(RuntimeError, match="shapes"):
            drain(running)
