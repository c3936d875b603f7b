"""A device that fails: rows are computed again in smaller chunks, and none of them is blamed."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from batchkv_worker.engine import recovery
from batchkv_worker.engine.engine import Engine
from batchkv_worker.engine.prefill import Prefill
from batchkv_worker.engine.schedule.memory import CALM_ROWS, LEAST_CHUNK
from batchkv_worker.events import Completed
from batchkv_worker.kv.backends import device
from batchkv_worker.kv.layers.decode import DecodeSlots
from batchkv_worker.sequence import Generation, Sequence
from worker.engine.test_oom import drain, engine, failing, submit
from worker.kv.crowd import random_prompt

METAL = "[METAL] Command buffer execution failed: "
TIMEOUT = RuntimeError(
    f"{METAL}Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)"
)
VICTIM = RuntimeError(
    f"{METAL}Innocent Victim (00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim)"
)
LATER = RuntimeError(
    f"{METAL}Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)"
)


class Clock:
    """Jumps two minutes at each look: no two faults are near each other."""

    def __init__(self, step_seconds: float) -> None:
        self.now, self._step_seconds = 0.0, step_seconds

    def __call__(self) -> float:
        self.now += self._step_seconds
        return self.now


def with_clock(running: Engine, step_seconds: float) -> Engine:
    running._recovery._clock = Clock(step_seconds)
    return running


PLACES: dict[str, tuple[Any, str, set[int], Exception]] = {
    "a chunk of a prompt": (Prefill, "_compute_chunk", {3, 5}, VICTIM),
    "a decode step": (DecodeSlots, "end_step", {5, 12}, TIMEOUT),
}


@pytest.mark.parametrize("place", PLACES)
def test_rows_go_on_token_for_token(place: str) -> None:
    """Wherever the device fails: all rows end as without it, and the budget is what it was."""
    owner, name, at, fault = PLACES[place]
    calm = engine("llama")
    submit(calm)
    expected = drain(calm)
    running = with_clock(engine("llama"), 120.0)
    submit(running)
    before = running._scheduler.budget
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, failing(getattr(owner, name), at, fault))
        got = drain(running)
    assert running._recovery.num_device_faults == len(at)
    assert running._recovery.num_out_of_memory == 0
    assert running._scheduler.budget.memory_bytes == before.memory_bytes
    assert running._scheduler.budget.chunk_tokens == before.chunk_tokens // 2 ** len(at)
    for job_id, event in expected.items():
        assert got[job_id].token_ids == event.token_ids, job_id
        assert got[job_id].usage == event.usage


def test_what_a_device_reports_late_is_the_same_failure() -> None:
    """Metal lets innocent calls raise after a failure. That is no second failure."""
    running = with_clock(engine("llama"), 0.01)
    row = Sequence("alone", random_prompt(9, 300), Generation(3, temperature=0.0))
    running.submit_row(row)
    synchronize, evaluate, late = mx.synchronize, mx.eval, [VICTIM, VICTIM]

    def poisoned(call: Any) -> Any:
        def wrapped(*args: Any) -> Any:
            if failed and late:
                raise late.pop()
            return call(*args)

        return wrapped

    failed: list[bool] = []

    def compute(self: Prefill, group: Any) -> None:
        if not failed:
            failed.append(True)
            raise TIMEOUT
        whole(self, group)

    with pytest.MonkeyPatch.context() as patch:
        whole = Prefill._compute_chunk
        patch.setattr(Prefill, "_compute_chunk", compute)
        patch.setattr(device.mx, "synchronize", poisoned(synchronize))
        patch.setattr(device.mx, "eval", poisoned(evaluate))
        got = drain(running)
    assert not late
    assert running._recovery.num_device_faults == 1
    assert running._scheduler.budget.chunk_tokens == 128
    assert row.num_failures == 0
    assert isinstance(got["alone"], Completed)


def test_a_shortage_that_is_reported_late_is_the_same_shortage() -> None:
    """A row alone has one failure, and the budget shrinks once, however often MLX raises for it."""
    running = engine("llama")
    row = Sequence("alone", random_prompt(9, 300), Generation(9, temperature=0.0))
    running.submit_row(row)
    before, late = running._scheduler.budget.memory_bytes, [LATER, LATER, LATER]
    end_step, synchronize, failed = DecodeSlots.end_step, mx.synchronize, list[bool]()

    def fail_once(self: DecodeSlots) -> None:
        if not failed:
            failed.append(True)
            raise LATER
        end_step(self)

    def poisoned(*args: Any) -> Any:
        if failed and late:
            raise late.pop()
        return synchronize(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecodeSlots, "end_step", fail_once)
        patch.setattr(mx, "synchronize", poisoned)
        while not failed:
            running.step()
        assert row.num_failures == 1
        held = running._scheduler.budget.memory_bytes
        assert isinstance(drain(running)["alone"], Completed)
    assert not late and held < before and running._recovery.num_out_of_memory == 1


def test_two_failures_within_a_minute_end_the_engine() -> None:
    """The second is raised as MLX raised it, so that the worker recognizes it by its text."""
    running = with_clock(engine("llama"), recovery.FAULT_SECONDS - 1)
    submit(running)
    with pytest.MonkeyPatch.context() as patch:
        broken = failing(DecodeSlots.end_step, {2, 9}, TIMEOUT)
        patch.setattr(DecodeSlots, "end_step", broken)
        with pytest.raises(RuntimeError, match="GPU Timeout"):
            drain(running)
    assert running._recovery.num_device_faults == 2


def test_a_device_that_stays_broken_ends_the_engine() -> None:
    """If each call raises, as on CUDA after a launch timed out, nothing waits for ever."""
    running = engine("llama")
    submit(running)
    with pytest.MonkeyPatch.context() as patch:

        def broken(*_: Any) -> None:
            raise VICTIM

        def breaks(*_: Any) -> None:
            patch.setattr(mx, "synchronize", broken)
            raise TIMEOUT

        patch.setattr(DecodeSlots, "end_step", breaks)
        with pytest.raises(RuntimeError, match="GPU Timeout"):  # what failed first
            drain(running)
    assert running._recovery.num_device_faults == 1  # no row was begun on it again


def test_chunks_grow_again_as_rows_end() -> None:
    """They are halved down to a bound, and doubled after many rows that ended well."""
    memory = engine("llama")._scheduler.memory
    for _ in range(9):
        memory.halve_chunk()
    assert memory.budget.chunk_tokens == LEAST_CHUNK
    for expected in (64, 128, 256, 256):
        assert memory.budget.chunk_tokens == expected
        for _ in range(CALM_ROWS):
            memory.relax()


def test_a_chunk_that_grows_is_that_of_the_next_group() -> None:
    """Layers with a window have room for the chunks that their group began with."""
    calm, running = engine("gemma3_text"), engine("gemma3_text")
    for each in (calm, running):
        each.submit_row(Sequence("long", random_prompt(3, 900), Generation(9, temperature=0.0)))
    expected = drain(calm)["long"]
    memory = running._scheduler.memory
    memory.halve_chunk()
    memory.halve_chunk()
    group = running._prefill.next_group()
    assert group is not None and group is running._prefill.advance()
    assert group.position == 64
    for _ in range(2 * CALM_ROWS):
        memory.relax()
    assert memory.budget.chunk_tokens == 256
    running._prefill.advance()
    assert group.position == 128
    got = drain(running)["long"]
    assert isinstance(expected, Completed) and isinstance(got, Completed)
    assert got.token_ids == expected.token_ids


def test_draining_ends_when_nothing_more_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors may come one by one, between calls that succeed; too many are a broken device."""
    script = [None, VICTIM, TIMEOUT, None, None, None, LATER, None, None, None, None]

    def call(*_: Any) -> None:
        if (fault := script.pop(0)) is not None:
            raise fault

    monkeypatch.setattr(mx, "synchronize", call)
    monkeypatch.setattr(mx, "eval", call)
    assert device.drain() and not script
    script += [VICTIM] * 99
    assert not device.drain() and len(script) > 50


def test_a_report_that_comes_while_memory_is_given_back_ends_nothing() -> None:
    """Any call may raise for what failed before, the ones of the recovery too."""
    running = with_clock(engine("llama"), 0.01)
    submit(running)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecodeSlots, "end_step", failing(DecodeSlots.end_step, {2}, TIMEOUT))
        patch.setattr(mx, "clear_cache", failing(mx.clear_cache, {1}, VICTIM))
        assert len(drain(running)) == 6
    assert running._recovery.num_device_faults == 1
