"""The thread that launches exists before the weights are read, and the first engine takes it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from batchkv_worker.engine import chunk_size, factory, kept_measurements
from batchkv_worker.engine import engine as engines
from batchkv_worker.engine.engine import Engine
from batchkv_worker.errors import ModelError
from batchkv_worker.kv.backends import device, timing, warm_up
from batchkv_worker.kv.backends.generic import GenericBackend
from batchkv_worker.kv.backends.launching import AtOnce, Beside, choose
from batchkv_worker.kv.backends.warm_up import EarlyLaunches
from batchkv_worker.kv.start import backend as backends
from batchkv_worker.kv.start import pathcheck
from batchkv_worker.model import loader
from batchkv_worker.settings import WorkerSettings
from support import tiny_models
from worker.engine.test_launches import GPU, beside_others, drained, engine, threads
from worker.kv.crowd import model_of


def early_thread(works: list[Any] | None = None) -> tuple[EarlyLaunches, Beside]:
    """What ``begin`` makes, for a model that needs no plans."""
    early = EarlyLaunches(GPU)
    launches = choose(is_beside=True)
    assert isinstance(launches, Beside)
    launches.warm_up(works or [])
    early._launches = launches
    return early, launches


def test_the_first_engine_takes_the_thread_that_is_there() -> None:
    """Its rows are those of an engine that launches itself. It leaves it to the next one."""
    expected = drained(engine(is_beside=False))

    def run() -> tuple[dict[str, list[int]], dict[str, list[int]]]:
        early, launches = early_thread([lambda: mx.eval(mx.zeros((8, 8)) @ mx.ones((8, 8)))] * 99)
        first = engine(is_beside=True, early=early)
        assert first._launches is launches and threads() == ["batchkv-launch"]
        answers = drained(first)
        assert not threads()
        second = engine(is_beside=True, early=early)
        assert second._launches is launches  # whose thread has plans of attention
        return answers, drained(second)

    assert beside_others(run) == (expected, expected)
    assert not threads()


@pytest.mark.parametrize("reason", ["backend", "model"])
def test_an_engine_that_launches_itself_ends_it(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend wants none, or the model cannot be traced."""

    def run() -> None:
        early, _ = early_thread()
        if reason == "model":
            plan_of = engines.make_plan
            untraced = lambda *a, **b: replace(plan_of(*a, **b), replays=False)  # noqa: E731
            monkeypatch.setattr(engines, "make_plan", untraced)
        made = engine(is_beside=reason != "backend", early=early)
        assert isinstance(made._launches, AtOnce) and not threads()
        made.close()

    beside_others(run)


def test_an_engine_without_it_makes_its_own() -> None:
    def run() -> None:
        made = engine(is_beside=True, early=EarlyLaunches(GPU))
        assert isinstance(made._launches, Beside)
        made.close()

    beside_others(run)


# -- a whole start


@dataclass(frozen=True, eq=False)
class Quick(GenericBackend):
    """Measures no chunks."""

    replays_steps: bool = True
    launches_beside: bool = True
    measures_chunk: bool = False


@dataclass(frozen=True, eq=False)
class Measuring(Quick):
    """Measures them."""

    measures_chunk: bool = True


class Seen:
    """What happened in the order in which it did."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fails: bool = False) -> None:
        self.events: list[str] = []
        self.works = threading.Event()
        self.thread: threading.Thread | None = None  # that did the work
        read = loader._read

        def reading(weights: list[mx.array]) -> None:
            if threads():
                assert self.works.wait(60), "nothing is computed meanwhile"
            self.events.append("read")
            if fails:
                raise ValueError("a file is spoilt")
            read(weights)

        monkeypatch.setattr(loader, "_read", reading)
        monkeypatch.setattr(warm_up, "works_for", self._works_for)

    def _works_for(self, _backend: Any, model: Any, dtype: mx.Dtype) -> list[Any]:
        assert model.args.num_attention_heads and dtype == mx.float32
        self.events.append("begin")
        return [self._work]

    def _work(self) -> None:
        self.thread = threading.current_thread()
        mx.eval(mx.zeros((4, 4)) @ mx.zeros((4, 4)))
        self.events.append("work")
        self.works.set()


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkerSettings:
    monkeypatch.setenv("BATCHKV_HOME", str(tmp_path))
    monkeypatch.setattr(timing, "MOST_SECONDS", 0.05)
    monkeypatch.setattr(pathcheck, "LENGTHS", (64,))
    return WorkerSettings(model="demo", slots=2, memory_bytes=2**27)


def serve_by(monkeypatch: pytest.MonkeyPatch, backend: type[GenericBackend]) -> None:
    monkeypatch.setattr(backends, "choose_backend", backend)
    monkeypatch.setattr(
        kept_measurements, "choose_backend", lambda kept: backend(measurements=kept)
    )


def test_plans_are_made_before_the_weights_are_there(
    settings: WorkerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine launches by the same thread, on the same stream as its own.

    It measures when no more is planned.
    """
    serve_by(monkeypatch, Quick)
    seen = Seen(monkeypatch)
    for owner, name, event in ((Beside, "end_warm_up", "end"), (engines, "make_plan", "measure")):
        real = getattr(owner, name)

        def noting(*given: Any, _real: Any = real, _event: str = event, **named: Any) -> Any:
            seen.events.append(_event)
            return _real(*given, **named)

        monkeypatch.setattr(owner, name, noting)

    def run() -> None:
        built = factory.build_engine(settings)
        assert isinstance(built._launches, Beside) and threads() == ["batchkv-launch"]
        assert built._launches._thread is seen.thread
        assert built._launches._stream == mx.default_stream(mx.default_device())
        assert seen.events == ["begin", "work", "read", "end", "measure"]
        built.close()

    beside_others(run)
    assert not threads()


def test_a_start_compiles_what_rows_would_wait_for(
    settings: WorkerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, however many engines are built of one model."""
    compiled: list[mx.Dtype] = []
    monkeypatch.setattr(device, "compile_kernels", compiled.append)
    builder = factory._Builder(settings)
    for _ in range(2):
        builder.engine(builder.loaded).close()
    assert compiled == [mx.float32]


def test_other_devices_start_as_ever(
    settings: WorkerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_by(monkeypatch, GenericBackend)
    monkeypatch.setattr(GenericBackend, "measures_chunk", False)
    seen = Seen(monkeypatch)

    def run() -> None:
        built = factory.build_engine(settings)
        assert isinstance(built._launches, AtOnce)
        built.close()

    beside_others(run)
    assert seen.events == ["read"]


@pytest.mark.parametrize("place", ["reading", "the memory", "the engine", "the sizes of chunks"])
def test_a_start_that_fails_ends_the_thread(
    place: str, settings: WorkerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_by(monkeypatch, Quick)
    seen = Seen(monkeypatch, fails=place == "reading")

    def fail(*_: Any, **__: Any) -> Any:
        raise ModelError("it does not fit")

    if place == "the memory":
        monkeypatch.setattr("batchkv_worker.kv.start.kv_memory.choose_memory", fail)
    if place == "the engine":
        monkeypatch.setattr(engines, "make_plan", fail)
    if place == "the sizes of chunks":  # the engine has taken the thread then
        serve_by(monkeypatch, Measuring)
        monkeypatch.setattr(chunk_size, "measure", fail)

    def run() -> None:
        with pytest.raises(ModelError):
            factory.build_engine(settings)
        assert not threads()

    beside_others(run)
    assert seen.events == ["begin", "work", "read"]


def test_two_engines_share_no_thread() -> None:
    """Whoever was first has the one that was there."""

    def run() -> None:
        early, launches = early_thread()
        model = tiny_models.loaded(model_of("llama"))
        configs = [replace(engine(is_beside=False).config, backend=GPU, early=early)] * 2
        both = [Engine(model, config) for config in configs]
        assert both[0]._launches is launches and both[1]._launches is not launches
        assert len(threads()) == 2
        for one in both:
            one.close()
        assert not threads()

    beside_others(run)
