"""The figures of a real engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from batchkv_producer.wire.job import Request, SamplingParams
from batchkv_worker.engine.engine import Engine, EngineConfig
from batchkv_worker.events import Completed, HasFigures, Work
from support import tiny_models


def work(job_id: str, **params: Any) -> Work:
    values: dict[str, Any] = {"max_tokens": 4, "temperature": 0.0, **params}
    request = Request(job_id, "completion", prompt="1 2 3", params=SamplingParams(**values))
    return Work(job_id, request)


def test_an_engine_counts_rows_once(monkeypatch: Any) -> None:
    """First tokens and ends are counted by lane: a row once, however many choices it has and
    however often memory runs out. What is held is read again after a second."""
    model = tiny_models.build("llama")
    config = EngineConfig(
        **{"scheme": "float", "slots": 6, "chunk_tokens": 256, "memory_bytes": 2**28},
        backend=tiny_models.measured(model, "float", 6),
    )
    running = Engine(tiny_models.loaded(model), config)
    assert isinstance(running, HasFigures)
    at_start = running.figures()
    monkeypatch.setattr("batchkv_worker.engine.diagnostics.LEVELS_SECONDS", 0.0)
    running._diagnostics._levels_at = 0.0
    running.add(work("a"))
    running.add(work("b", n=3, temperature=1.0))
    running.add(replace(work("c"), is_live=True))
    running.add(work("d", max_tokens=10_000_000))  # it is refused
    ends, most_decode, has_failed = [], 0.0, False
    step = running._step

    def fails_once() -> None:
        nonlocal has_failed
        if most_decode and not has_failed:
            has_failed = True
            raise MemoryError("as a test says")
        step()

    monkeypatch.setattr(running, "_step", fails_once)
    while not running.is_idle:
        ends += [one for one in running.step() if isinstance(one, Completed)]
        most_decode = max(most_decode, running.figures().levels["rows.decode"])
    found = running.figures()
    rows = {key: sum(one.counts) for key, one in found.times.items()}
    assert len(ends) == 3
    assert rows == {"first_token.batch": 2, "first_token.live": 1, "row.batch": 2, "row.live": 1}
    assert found.times["row.batch"].total_seconds >= found.times["first_token.batch"].total_seconds
    assert most_decode >= 3 and found.levels["rows.decode"] == 0
    assert found.counts["recoveries.memory"] == 1 and at_start.counts["recoveries.memory"] == 0
    assert found.levels["kv_memory_budget"] > 0 and found.levels["memory.peak"] > 0
    running.close()
