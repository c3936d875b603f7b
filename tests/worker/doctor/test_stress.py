"""The load: equal waves on a sound device, and every fault of it found."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from batchkv_producer.doctor.contract import Level
from batchkv_worker.doctor import stress
from batchkv_worker.doctor.stress import Record, Wave
from batchkv_worker.engine.engine import Engine
from worker.doctor.small_engine import small_engine

SECONDS = 0.3


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """A small engine, and small waves."""
    monkeypatch.setattr(stress, "LENGTHS", (3, 17, 40))
    monkeypatch.setattr(stress, "NUM_TOKENS", 6)
    monkeypatch.setattr(stress, "FIRST_ROWS", 2)
    with small_engine() as found:
        yield found


def test_a_sound_device_gives_equal_waves(engine: Engine) -> None:
    """Both compositions are computed several times, and each gives what it gave first."""
    record = Record()
    verdict = stress._run(engine, SECONDS, record)
    assert verdict.level is Level.OK, verdict
    assert {wave.kind for wave in record.waves} == {"first", "all", "some"}
    judged = stress.judge_tokens(record)
    assert judged is not None and judged.level is Level.OK, judged
    for other in (stress.judge_memory(record), stress.judge_speed(record)):
        assert other is None or other.level is not Level.FAIL


def test_tokens_that_change_under_load_are_found(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product that loses a part every now and then changes answers, and no error is raised."""
    right, record = engine.loaded.model, Record()

    class Spoilt:
        """The model, whose logits are turned around from the fourth wave on."""

        def __call__(self, *args: Any, **named: Any) -> mx.array:
            logits = right(*args, **named)
            return -logits if len(record.waves) > 2 else logits

        def __getattr__(self, name: str) -> Any:
            return getattr(right, name)

    monkeypatch.setattr(type(engine.loaded), "model", Spoilt(), raising=False)
    stress._run(engine, SECONDS, record)
    verdict = stress.judge_tokens(record)
    assert verdict is not None and verdict.level is Level.FAIL, verdict
    assert "do not trust" in verdict.todo


def test_an_error_of_the_device_ends_the_load(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named, with the ways around that others reported."""
    calls = [0]

    def churn(_: Any) -> None:
        calls[0] += 1
        if calls[0] == 3:
            raise RuntimeError("[METAL] Command buffer execution failed: Impacting Interactivity")

    monkeypatch.setattr(stress, "churn", churn)
    record = Record()
    verdict = stress._run(engine, 30.0, record)
    assert verdict.level is Level.FAIL and "Impacting Interactivity" in verdict.found
    assert "AGX_RELAX_CDM_CTXSTORE_TIMEOUT=1" in verdict.todo


def test_what_the_engine_recovers_from_is_a_warning(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log is read while the load runs."""
    monkeypatch.setattr(stress, "churn", lambda _: logging.getLogger("batchkv.engine").warning(
        "memory ran out: rows are computed again"))  # fmt: skip
    verdict = stress._run(engine, 0.3, Record())
    assert verdict.level is Level.WARN and "memory ran out" in verdict.found


WAVE = Wave("all", 1.0, 20, 1000, 0, 2**30, 0)


def record(*waves: Wave, is_exact: bool = False) -> Record:
    return Record(is_exact, list(waves))


@pytest.mark.parametrize(
    ("different", "is_exact", "level"),
    [(0, False, Level.OK), (1, False, Level.WARN), (1, True, Level.FAIL), (9, False, Level.FAIL)],
)
def test_differences_are_judged(different: int, is_exact: bool, level: Level) -> None:
    """In float32 one is too many; in half precision many are."""
    waves = [WAVE, WAVE, WAVE, replace(WAVE, num_different=different)]
    verdict = stress.judge_tokens(record(*waves, is_exact=is_exact))
    assert verdict is not None and verdict.level is level


def test_few_waves_say_little() -> None:
    """A time that is too short is a warning; no wave at all was said before."""
    few = stress.judge_tokens(record(WAVE))
    assert few is not None and few.level is Level.WARN and "--seconds" in few.todo
    assert stress.judge_tokens(record()) is None
    assert stress.judge_memory(record(WAVE)) is None
    assert stress.judge_speed(record(WAVE)) is None


def test_memory_that_grows_is_found() -> None:
    """What was freed and kept counts, for a pool that grows is the reported fault."""
    grows = [replace(WAVE, kept_bytes=number * 2**28) for number in range(12)]
    growing = stress.judge_memory(record(*grows))
    assert growing is not None and growing.level is Level.WARN and "grows" in growing.found
    steady = stress.judge_memory(record(*[replace(WAVE, kept_bytes=2**28)] * 12))
    assert steady is not None and steady.level is Level.OK


def test_a_machine_that_slows_down_is_found() -> None:
    """Half the speed in the second half is heat, or another program."""
    slows = [WAVE] * 6 + [replace(WAVE, seconds=2.0)] * 6
    slowed = stress.judge_speed(record(*slows))
    assert slowed is not None and slowed.level is Level.WARN
    steady = stress.judge_speed(record(*[WAVE] * 12))
    assert steady is not None and steady.level is Level.OK


def test_prompts_fit_the_model(engine: Engine) -> None:
    """None is longer than the context allows; every other long one has the shared beginning."""
    prompts = stress.prompts_of(engine, 9)
    assert len(prompts) == 9
    room = engine.loaded.context - stress.NUM_TOKENS
    assert all(0 < len(prompt) < room for prompt in prompts)
