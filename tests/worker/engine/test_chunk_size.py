"""How large chunks of prompts are chosen."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from batchkv_worker.engine import chunk_size as chunk_probe
from batchkv_worker.engine import engine
from batchkv_worker.engine.engine import Engine, EngineConfig
from batchkv_worker.kv.backends.cuda.backend import CudaBackend
from batchkv_worker.kv.backends.gpu.backend import GpuBackend
from batchkv_worker.kv.backends.launching import AtOnce
from batchkv_worker.kv.start.plan import KvPlan
from batchkv_worker.sequence import Generation, Sequence
from support import tiny_models


class SlowCompiler:
    """A clock, and a device that compiles for each size what it computes the first time."""

    def __init__(self, seconds: dict[int, float], compiling: float) -> None:
        self.now = 100.0
        self._seconds, self._compiling = seconds, compiling
        self._known: set[int] = set()
        self.computed: list[int] = []

    def perf_counter(self) -> float:
        return self.now

    def compute(self, _loaded: object, _plan: object, size: int, _launches: object) -> None:
        self.computed.append(size)
        self.now += self._seconds[size] if size in self._known else self._compiling
        self._known.add(size)


def chosen_on(
    monkeypatch: pytest.MonkeyPatch,
    device: SlowCompiler,
    *,
    is_cuda: bool = True,
    observe: Callable[[int, float], object] = lambda *_: None,
) -> int:
    """The size that `auto` chooses there; ``observe`` gets its tokens and seconds."""
    monkeypatch.setattr(chunk_probe, "time", device)
    monkeypatch.setattr(chunk_probe, "_compute", device.compute)
    plan = SimpleNamespace(backend=CudaBackend() if is_cuda else GpuBackend())
    loaded: Any = SimpleNamespace(context=32_768, config={})
    return chunk_probe.choose_chunk(loaded, cast("KvPlan", plan), observe)


def test_the_speed_that_was_measured_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a worker's first prompt can be compared with loading it, before any was computed."""
    told: list[tuple[int, float]] = []
    device = SlowCompiler({256: 0.2, 512: 0.3, 1024: 0.5, 2048: 1.0, 4096: 2.0}, compiling=0.1)
    chosen = chosen_on(monkeypatch, device, observe=lambda *one: told.append(one))
    assert [size for size, _ in told] == [chosen] == [1024]
    assert told[0][1] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("speeds", "is_whole", "chosen"),
    [
        ({256: 100.0, 512: 180.0, 1024: 200.0, 2048: 201.0}, True, 1024),
        ({256: 200.0, 512: 150.0}, True, 256),
        ({256: 98.0, 512: 100.0, 1024: 90.0}, True, 256),
        ({256: 98.0, 512: 100.0}, False, 256),
        ({256: 50.0, 512: 100.0}, False, 2048),
        ({256: 50.0}, False, 2048),
        ({256: 50.0}, True, 256),
        ({}, True, 2048),
    ],
)
def test_the_smallest_that_is_nearly_the_fastest(
    speeds: dict[int, float], is_whole: bool, chosen: int
) -> None:
    """A few percent are not worth a longer wait of the rows that decode; larger gains are."""
    assert chunk_probe.smallest_fast(chunk_probe.Measured(speeds, is_whole), 2048) == chosen


@pytest.mark.parametrize(("each", "chosen"), [(0.0, 2048), (0.01, 4096), (0.0001, 2048)])
def test_fewer_chunks_cost_the_host_less(each: float, chosen: int) -> None:
    """Speeds of an H100. Nothing of this changes what is stored of them."""
    speeds = {256: 18082.0, 512: 36909.0, 1024: 58399.0, 2048: 70161.0, 4096: 69423.0}
    found = chunk_probe.Measured(dict(speeds), is_whole=True)
    assert chunk_probe.smallest_fast(found, 2048, 0, each) == chosen
    assert found.speeds == speeds


def test_what_the_host_does_for_a_chunk_counts_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 2,048 and of 4,096 tokens are computed as fast; larger ones are fewer."""
    seconds = {256: 0.014, 512: 0.0145, 1024: 0.0175, 2048: 0.0295, 4096: 0.059}
    device = SlowCompiler(seconds, compiling=0.1)
    assert chosen_on(monkeypatch, device) == 4096
    monkeypatch.setattr(GpuBackend, "largest_chunk", 4096)
    assert chosen_on(monkeypatch, SlowCompiler(seconds, compiling=0.1), is_cuda=False) == 2048


@pytest.mark.parametrize(
    ("config", "memory", "least"),
    [
        ({"num_experts": 128}, 64, 1024),
        ({"num_local_experts": 8}, 36, 1024),
        ({"text_config": {"n_routed_experts": 64}}, 64, 1024),
        ({"num_experts": 128}, 24, 0),  # what a large chunk computes at once might not fit
        ({"num_experts": 1}, 64, 0),
        ({"num_experts": None, "hidden_size": 8}, 64, 0),
        ({}, 64, 0),
    ],
)
def test_models_of_experts_get_large_chunks(config: Any, memory: int, least: int) -> None:
    """A chunk reads the weights of all experts: 1,024 tokens where there is memory for them.

    Only where there was no time to try; a device that tried them all knows better.
    """
    assert chunk_probe.least_chunk(config, memory * 2**30) == least
    flat = {256: 98.0, 512: 100.0}
    for is_whole, chosen in ((True, 256), (False, max(least, 256))):
        measured = chunk_probe.Measured(flat, is_whole)
        assert chunk_probe.smallest_fast(measured, 1024, least) == chosen


def test_compiling_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three seconds of compiling for each size keep no larger one from being tried and chosen."""
    for is_cuda, largest in ((True, 4096), (False, 2048)):
        device = SlowCompiler(dict.fromkeys(chunk_probe.SIZES, 0.05), compiling=3.0)
        assert chosen_on(monkeypatch, device, is_cuda=is_cuda) == largest
        assert max(device.computed) == largest
    flat = SlowCompiler({256: 0.05, 512: 0.06, 1024: 0.12, 2048: 0.24, 4096: 0.5}, compiling=3.0)
    assert chosen_on(monkeypatch, flat, is_cuda=False) == 512


@pytest.mark.parametrize(("is_cuda", "usual"), [(True, 2048), (False, 1024)])
def test_a_slow_device_gets_what_is_usual_there(
    monkeypatch: pytest.MonkeyPatch, is_cuda: bool, usual: int
) -> None:
    """One size takes all the time, computed or compiled: the usual size is chosen."""
    slow = SlowCompiler(dict.fromkeys(chunk_probe.SIZES, 3.0), compiling=3.0)
    assert chosen_on(monkeypatch, slow, is_cuda=is_cuda) == usual
    assert set(slow.computed) == {256}
    endless = SlowCompiler(dict.fromkeys(chunk_probe.SIZES, 0.05), compiling=40.0)
    assert chosen_on(monkeypatch, endless, is_cuda=is_cuda) == usual
    assert 1024 not in endless.computed


def test_a_waking_device_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least of several turns counts, so a slow first turn of a size does not matter."""
    seconds = {256: 0.1, 512: 0.2, 1024: 0.4, 2048: 0.8, 4096: 1.6}
    device = SlowCompiler(seconds, compiling=0.1)
    compute, is_awake = device.compute, []

    def wake(loaded: object, plan: object, size: int, launches: object) -> None:
        compute(loaded, plan, size, launches)
        if len(is_awake) < 2:
            device.now += 1.0
        is_awake.append(size)

    monkeypatch.setattr(device, "compute", wake)
    assert chosen_on(monkeypatch, device, is_cuda=False) == 256


def test_sizes_are_measured_within_the_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without any time one size is tried; the chosen size is used, and is in the log."""
    model = tiny_models.build("llama")
    monkeypatch.setattr(chunk_probe.mx, "default_device", lambda: "a GPU")
    monkeypatch.setattr(engine, "choose_launches", lambda *, is_beside: AtOnce())
    monkeypatch.setattr(chunk_probe, "SECONDS", 0.5)
    monkeypatch.setattr(chunk_probe, "SIZES", (256, 512))
    monkeypatch.setattr(chunk_probe, "TURNS", 1)
    config = EngineConfig("affine8", slots=2, chunk_tokens=None, memory_bytes=2**27, path="fused")
    with caplog.at_level("INFO"):
        running = Engine(tiny_models.loaded(model), config)
    assert running._scheduler.budget.chunk_tokens in (256, 512, 1024)
    assert "in chunks of" in caplog.text
    assert list(chunk_probe.measure(running.loaded, running.plan, 0.0).speeds) == [256]
    found = chunk_probe.measure(running.loaded, running.plan, 60.0)
    assert max(found.speeds) == 512 and found.is_whole
    running.submit_row(Sequence("a", [1] * 700, Generation(3, temperature=0.0)))
    while not running.is_idle:
        running.step()


def test_a_cpu_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start-up there takes no longer."""
    monkeypatch.setattr(chunk_probe, "measure", lambda *_: pytest.fail("measured"))
    config = EngineConfig("float", slots=2, chunk_tokens=None, memory_bytes=2**27, path="fused")
    running = Engine(tiny_models.loaded(tiny_models.build("llama")), config)
    assert running._scheduler.budget.chunk_tokens == 512
