"""The checks of a model: its files, its memory, a stored prefix, the likeliest tokens."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from batchkv_producer.doctor.contract import Level, Verdict
from batchkv_producer.wire.job import TokenLogprob, Usage
from batchkv_worker.demo import MODEL_PATH
from batchkv_worker.doctor import attention, capacity, hit_miss, model
from batchkv_worker.doctor.examined import Examined
from batchkv_worker.doctor.program import made
from batchkv_worker.engine import factory
from batchkv_worker.engine.engine import Engine
from batchkv_worker.engine.tokens import largest
from batchkv_worker.errors import ModelError, SettingsError
from batchkv_worker.events import Completed
from batchkv_worker.kv.start import pathcheck
from batchkv_worker.kv.start.pathcheck import PathCheck
from batchkv_worker.prefix import block_layout
from worker.doctor.small_engine import small_engine
from worker.prefix.engines_on_store import access, on_disk


@pytest.fixture(autouse=True)
def logs() -> Iterator[None]:
    """The checks silence the log of their process; the suite's is as before."""
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """A small engine with a store, which writes all prefixes."""
    way = access(on_disk(tmp_path / "store"), writes="all")
    with small_engine(way) as found:
        yield found


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention is compared at two lengths; ``tests/worker/kv/start`` has all five."""
    monkeypatch.setattr(pathcheck, "LENGTHS", (64, 110))


def test_files_of_a_model_are_found(tmp_path: Path) -> None:
    """The included model is whole; a copy without weights, and a name that is not here, fail."""
    assert model.files_verdict("demo").level is Level.OK
    copy = tmp_path / "copy"
    shutil.copytree(MODEL_PATH, copy)
    assert model.files_verdict(str(copy)).level is Level.OK
    (copy / "model.safetensors").unlink()
    assert model.files_verdict(str(copy)).level is Level.FAIL
    missing = model.files_verdict("nobody/no-such-model")
    assert missing.level is Level.FAIL and "batchkv ask" in missing.todo


def test_a_model_that_is_not_here_ends_the_checks() -> None:
    """Nothing is downloaded, and nothing more is tried."""
    found = [(name, make()) for name, make in model.steps({"model": "nobody/none", "cache": ""})]
    assert [name for name, _ in found] == ["model files"]


def test_a_stored_prefix_gives_the_same_tokens(engine: Engine, tmp_path: Path) -> None:
    """All full blocks come back from the store, and the answer is that of the cold start."""
    verdict = hit_miss.verdict(engine, tmp_path)
    assert verdict is not None and verdict.level is Level.OK, verdict
    assert "768 of 768 stored tokens" in verdict.found


def test_a_prefix_that_comes_back_wrong_is_found(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values that are read as zeros change the answer."""
    right = block_layout._array
    monkeypatch.setattr(block_layout, "_array", lambda tensor: mx.zeros_like(right(tensor)))
    verdict = hit_miss.verdict(engine, tmp_path)
    assert verdict is not None and verdict.level is Level.FAIL, verdict
    assert "differs from token" in verdict.found and "do not use the cache" in verdict.todo


def test_a_store_that_keeps_nothing_is_found(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file appears within the time: that is said, and nothing is waited for."""
    monkeypatch.setattr(hit_miss, "STORED_SECONDS", 0.2)
    verdict = hit_miss.verdict(engine, tmp_path / "elsewhere")
    assert verdict is not None and verdict.level is Level.WARN


def answer(tokens: tuple[int, ...], cached: int, leads: tuple[float, ...] = ()) -> Completed:
    top = tuple(TokenLogprob("a", -0.5, (("a", -0.5), ("b", -0.5 - lead))) for lead in leads)
    usage = Usage(800, len(tokens), cached)
    return Completed("0", "", "length", usage, tokens, top or None)


@pytest.mark.parametrize(
    ("hit", "leads", "level"),
    [
        (answer((1, 2, 3), 768), (), Level.OK),
        (answer((1, 9, 3), 768), (), Level.FAIL),
        (answer((1, 9, 3), 768), (5.0, 0.02, 5.0), Level.OK),  # two are about equally likely
        (answer((1, 9, 3), 768), (0.02, 5.0, 5.0), Level.FAIL),
        (answer((1, 2), 768), (), Level.FAIL),
        (answer((1, 2, 3), 0), (), Level.WARN),
    ],
)
def test_answers_are_compared(hit: Completed, leads: tuple[float, ...], level: Level) -> None:
    """A difference counts unless rounding explains it at that very token."""
    assert hit_miss.judge(answer((1, 2, 3), 0, leads), hit, 768).level is level


def test_the_likeliest_tokens_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """On this device they are; with a block forgotten they are not."""
    assert all(each.is_good for each in attention.compare_largest(5000))
    right = mx.argsort

    def forgets(array: mx.array, axis: int = -1) -> mx.array:
        return mx.roll(right(array, axis=axis), 1, axis=axis)

    monkeypatch.setattr(largest.mx, "argsort", forgets)
    assert not all(each.is_good for each in attention.compare_largest(5000))


@pytest.mark.parametrize(
    ("memory", "slots", "level"),
    [(8 * 2**30, 32, Level.OK), (2**29, 32, Level.WARN), (2**25, 16, Level.FAIL)],
)
def test_memory_is_judged(memory: int, slots: int, level: Level) -> None:
    """With 8 GiB, 512 MiB and 32 MiB for keys and values of 78 KB a token."""
    assert capacity.judge_memory(memory, 78_336, slots).level is level


def test_what_keeps_memory_from_a_model_is_said() -> None:
    """The worker's own sentences: what takes how much, and what to do."""
    problem = "0.7 GB of 8.0 GB are left. The model's weights take 4.1 GB. Use a smaller model"
    verdict = capacity.judge_memory(2**30, 78_336, 16, problem)
    assert verdict.level is Level.WARN
    assert "weights take 4.1 GB" in verdict.found and verdict.todo == "Use a smaller model"


@pytest.mark.parametrize(
    ("architecture", "is_slow"),
    [("applegpu_g13s", True), ("applegpu_g14g", True), ("applegpu_g16p", False), ("", False)],
)
def test_chips_without_bfloat16_are_known(architecture: str, is_slow: bool) -> None:
    """M1 and M2 by the name that MLX gives their GPUs."""
    assert capacity.is_slow_at_bfloat16(architecture) is is_slow


def test_float16_is_recommended_with_its_gain() -> None:
    """Only where it was measured to be faster."""
    assert "--dtype float16" in capacity.judge_dtype(1.34).todo
    assert "1.34 times" in capacity.judge_dtype(1.34).found
    assert not capacity.judge_dtype(1.01).todo


def test_a_prefix_pays_from_its_bytes_and_the_speed_of_prompts() -> None:
    """78 KB a token at 1,600 tokens a second are 125 MB/s."""
    assert capacity.break_even(78_336, 1600.0) == pytest.approx(125.3, abs=0.1)


def test_all_steps_of_a_loaded_model(
    engine: Engine, tmp_path: Path, short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the files to the tiers, which are judged by this model's speed; the engine is closed."""
    monkeypatch.setattr(capacity, "SPEED_SECONDS", 0.1)
    monkeypatch.setattr(attention, "SCHEMES", ("affine8",))
    closed = []

    def build(settings: Any) -> Engine:
        assert settings.cache_write == "all"
        monkeypatch.setattr(engine, "close", lambda: closed.append(True))
        return engine

    monkeypatch.setattr(factory, "build_engine", build)
    monkeypatch.setattr(hit_miss, "verdict", lambda *_: Verdict(Level.OK, "the same"))
    request = {"model": "demo", "scheme": "", "cache": f"disk:{tmp_path}", "queue": ""}
    found = {name: made(make) for name, make in model.steps(request)}
    assert closed == [True]
    assert {"model", "model's memory", "stored prefix", "prompt speed", "disk tier"} <= set(found)
    bad = {k: v for k, v in found.items() if v is not None and v.level is not Level.OK}
    assert not bad


@pytest.mark.parametrize(
    "fault", [ModelError("model 'x' is of no kind"), SettingsError("BATCHKV_SLOTS=x: expected")]
)
def test_a_model_that_cannot_be_served_fails(
    fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sentence is the worker's, and the other checks are left out."""

    def refuse(_: Any) -> Engine:
        raise fault

    monkeypatch.setattr(factory, "build_engine", refuse)
    request = {"model": "demo", "scheme": "", "cache": ""}
    found = {name: made(make) for name, make in model.steps(request)}
    assert list(found) == ["model files", "model"]
    verdict = found["model"]
    assert verdict is not None and verdict.level is Level.FAIL
    assert str(fault) in verdict.found


def test_settings_of_the_environment_are_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots and dtype count; the worker's own cache is not touched."""
    monkeypatch.setenv("BATCHKV_SLOTS", "7")
    monkeypatch.setenv("BATCHKV_CACHE", "redis://somewhere:6379/0")
    settings = model.settings_of(Examined("demo", "affine4", tmp_path))
    assert (settings.slots, settings.kv_scheme) == (7, "affine4")
    assert str(settings.cache).startswith(f"disk:{tmp_path}")


def path_check(name: str, error: float, fault: str = "") -> PathCheck:
    return PathCheck(name, 1_100, True, error, 0.01, fault)


@pytest.mark.parametrize(
    ("checks", "level", "words"),
    [
        ([path_check("fused", 0.001)], Level.OK, "within 0.001 of float32"),
        ([path_check("fused", 0.5)], Level.FAIL, "fused differs by 0.5"),
        ([path_check("packed", float("inf"))], Level.FAIL, "no number"),
        ([path_check("fused", 0.0), path_check("packed", 0.0, "no kernel")], Level.OK,
         "packed is not on this device"),
        ([path_check("packed", 0.0, "no kernel")], Level.FAIL, "no path"),
    ],
)  # fmt: skip
def test_paths_are_judged(checks: list[PathCheck], level: Level, words: str) -> None:
    """One that differs is a fault; one that the device lacks is left out."""
    verdict = attention.judge_paths(checks)
    assert verdict is not None and verdict.level is level and words in verdict.found, verdict
    assert attention.judge_paths([]) is None


def test_attention_of_this_device_is_right(
    engine: Engine, short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float and packed, and behind a shared prefix; a path that returns zeros is found."""
    for name in ("float", "affine8"):
        right = attention.scheme_verdict(engine, name)
        assert right is not None and right.level is Level.OK, right
    prefix = attention.prefix_verdict(engine)
    assert prefix is not None and prefix.level is Level.OK, prefix
    attend = pathcheck.attend
    monkeypatch.setattr(pathcheck, "attend", lambda *args: mx.zeros_like(attend(*args)))
    wrong = attention.scheme_verdict(engine, "affine8")
    assert wrong is not None and wrong.level is Level.FAIL
