"""How large chunks of prompts are chosen."""

from __future__ import annotations

import pytest

from batchkv_worker import chunk_probe
from batchkv_worker.engine import Engine, EngineConfig
from batchkv_worker.sequence import Generation, Sequence
from support import tiny_models


@pytest.mark.parametrize(
    ("speeds", "chosen"),
    [
        ({256: 100.0, 512: 180.0, 1024: 200.0, 2048: 201.0}, 1024),
        ({256: 200.0, 512: 150.0}, 256),
        ({256: 98.0, 512: 100.0, 1024: 90.0}, 256),
        ({}, chunk_probe.ON_CPU),
    ],
)
def test_the_smallest_that_is_nearly_the_fastest(speeds: dict[int, float], chosen: int) -> None:
    """A few percent are not worth a longer wait of the rows that decode."""
    assert chunk_probe.smallest_fast(speeds) == chosen


def test_sizes_are_measured_within_the_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without any time one size is tried; what is chosen serves, and is in the log."""
    model = tiny_models.build("llama")
    monkeypatch.setattr(chunk_probe.mx, "default_device", lambda: "a GPU")
    config = EngineConfig("affine8", slots=2, chunk_tokens=None, memory_bytes=2**27, path="fused")
    with caplog.at_level("INFO"):
        running = Engine(tiny_models.loaded(model), config)
    assert running._scheduler.budget.chunk_tokens in chunk_probe.SIZES
    assert "in chunks of" in caplog.text
    assert list(chunk_probe.measure(running.loaded, running.plan, 0.0)) == [256]
    assert max(chunk_probe.measure(running.loaded, running.plan, 60.0)) == 2048
    running.submit_row(Sequence("a", [1] * 700, Generation(3, temperature=0.0)))
    while not running.is_idle:
        running.step()


def test_a_cpu_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start-up there takes no longer."""
    monkeypatch.setattr(chunk_probe, "measure", lambda *_: pytest.fail("measured"))
    config = EngineConfig("float", slots=2, chunk_tokens=None, memory_bytes=2**27, path="fused")
    running = Engine(tiny_models.loaded(tiny_models.build("llama")), config)
    assert running._scheduler.budget.chunk_tokens == chunk_probe.ON_CPU
