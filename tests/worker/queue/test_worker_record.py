"""A worker's record on the server, and lines in its log."""

from __future__ import annotations

import signal
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from batchkv_producer.monitor.workers import WorkerInfo, read_workers
from batchkv_producer.wire.job import Usage
from batchkv_producer.wire.maker import ABILITIES
from batchkv_worker.engine.thread import EngineThread
from batchkv_worker.events import Completed
from batchkv_worker.model import load_progress as loading
from batchkv_worker.model import loader as model
from batchkv_worker.queue import abilities
from batchkv_worker.queue.in_flight import InFlight
from batchkv_worker.queue.rq_worker import BatchWorker
from batchkv_worker.queue.state import WorkerState
from batchkv_worker.queue.stop import StopRequest
from batchkv_worker.queue.worker_record import LastMinute, WorkerRecord, constant_fields
from batchkv_worker.settings import WorkerSettings
from support import tiny_models  # noqa: F401 - first: it loads the BLAS
from support.fake_engine import FakeEngine, FakePlan
from support.worker_harness import (
    QUICK_LEASES,
    WorkerProcess,
    num_ended,
    submit,
    wait_until,
    workers,
)

PATIENCE = 30.0


def only_worker(connection: Redis) -> WorkerInfo | None:
    found = read_workers(connection)
    return found[0] if found else None


def fresh_state() -> WorkerState:
    return WorkerState(InFlight("fake", "w"), StopRequest(lambda: None))


def test_a_worker_tells_of_itself(redis_connection: Redis, redis_url: str, tmp_path: Path) -> None:
    """While it loads, its record says how far; then what it runs, how fast and in what memory."""
    plan: dict[str, object] = {"load_seconds": 2.5, "loading": "loading 2.1 of 7.3 GB"}
    settings = {**QUICK_LEASES, "KV_SCHEME": "affine4"}
    worker = WorkerProcess(redis_url, tmp_path / "log", plan=plan, settings=settings)
    seen: list[WorkerInfo] = []

    def tells_that(**wanted: Any) -> bool:
        found = only_worker(redis_connection)
        seen[:] = [found] if found else []
        return found is not None and all(getattr(found, k) == v for k, v in wanted.items())

    with workers(worker):
        wait_until(lambda: tells_that(doing="loading 2.1 of 7.3 GB", is_loading=True), PATIENCE)
        assert seen[0].num_slots == 0
        wait_until(lambda: tells_that(doing="", is_loading=False), PATIENCE)
        submit(redis_connection, ["a", "b"])
        wait_until(
            lambda: (
                tells_that(num_successful=2, memory_bytes=3_100_000_000, num_slots=32)
                and bool(seen[0].tokens_per_second)
            ),
            PATIENCE,
        )
    assert (seen[0].model, seen[0].scheme) == ("fake", "affine4")
    assert seen[0].version[0].isdigit()
    assert "model fake: loading 2.1 of 7.3 GB" in worker.said


def test_a_stop_says_what_becomes_of_the_rows(
    redis_connection: Redis, redis_url: str, tmp_path: Path
) -> None:
    """SIGTERM: how many rows are finished, for how long, and what a second signal does."""
    batch = submit(redis_connection, ["quick", *["slow:1000000"] * 3])
    plan: dict[str, object] = {"step_seconds": 0.001}
    worker = WorkerProcess(redis_url, tmp_path / "log", plan=plan, settings={"DRAIN_SECONDS": 1})
    with workers(worker):
        wait_until(lambda: num_ended(redis_connection, batch) == 1, PATIENCE)
        worker.process.send_signal(signal.SIGTERM)
        assert worker.wait(PATIENCE) == 0
    assert "finishing 3 rows, up to 1 s; a second signal gives them back now" in worker.said
    assert worker.said.count("finishing 3 rows") == 1


def test_an_idle_worker_says_that_it_stops(
    redis_connection: Redis, redis_url: str, tmp_path: Path
) -> None:
    """With nothing in the engine a line says so, and the process ends at once."""
    worker = WorkerProcess(redis_url, tmp_path / "log")
    with workers(worker):
        wait_until(lambda: "the engine is ready" in worker.said, PATIENCE)
        wait_until(lambda: (w := only_worker(redis_connection)) and w.state == "idle", PATIENCE)
        worker.process.send_signal(signal.SIGTERM)
        assert worker.wait(PATIENCE) == 0
    assert worker.said.count("stopping: nothing to finish") == 1


def ended(generated: int, prompt: int, cached: int) -> Completed:
    return Completed("j", "", "stop", Usage(prompt=prompt, completion=generated, cached=cached))


def test_the_last_minute_forgets_what_is_older() -> None:
    """Sums are of sixty seconds, and the speed is that of the time in which there were rows."""
    now = [100.0]
    minute = LastMinute(lambda: now[0])
    for second in range(1, 121):
        now[0] += 1
        if second % 2:
            minute.add(ended(second, 20, 10))
        minute.sample(is_busy=False)
    rows, generated, prompt, cached = minute.counts
    assert (rows, generated) == (30, sum(range(61, 121, 2)))
    assert (prompt, cached) == (600, 300)
    assert minute.tokens_per_second == pytest.approx(generated / 30) and minute.busy_seconds == 30
    now[0] += 61
    minute.sample(is_busy=False)
    assert minute.counts[0] == 0 and minute.tokens_per_second == 0


def test_a_minute_of_work_is_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows, tokens a second, slots and the cache's share; a minute without rows says nothing."""
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    settings = WorkerSettings(model="fake")
    engine = EngineThread(lambda: FakeEngine(32, 8, FakePlan()))
    engine.num_slots = 32
    state = fresh_state()
    told = WorkerRecord(settings, engine, state, lambda _: None)
    caplog.set_level("INFO")
    for _ in range(60):
        now[0] += 1
        told.update()
    assert "last minute" not in caplog.text
    state.in_flight.num_started = 30
    for _ in range(60):
        told.count(ended(120, 1000, 610))
        now[0] += 1
        told.update()
    assert "last minute: 60 rows, 120 tok/s, 30 of 32 slots, cache 61 %" in caplog.text


def test_the_first_speed_is_published_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the first rows have ended, not at the next heartbeat; and only then."""
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    engine = EngineThread(lambda: FakeEngine(32, 8, FakePlan()))
    state, published = fresh_state(), list[dict[str, str]]()
    record = WorkerRecord(WorkerSettings(model="fake"), engine, state, published.append)
    state.in_flight.num_started = 3
    assert record.fields()["bkv_tokens_per_second"] == "0"
    for seconds in range(10):
        if seconds > 4:
            record.count(ended(100, 10, 0))
        now[0] += 1
        record.update()
    assert [one["bkv_tokens_per_second"] for one in published] == ["17"]


def test_a_worker_that_is_short_of_memory_says_so() -> None:
    """The engine's words are its state at once, until it stops. Readers see all fields with it."""
    engine = EngineThread(lambda: FakeEngine(4, 8, FakePlan(trouble="short of memory")))
    published: list[dict[str, str]] = []
    settings = WorkerSettings(model="fake")
    record = WorkerRecord(settings, engine, fresh_state(), published.append)
    engine.start()
    wait_until(lambda: record.state == "short of memory", PATIENCE)
    record.update()
    assert [one["bkv_state"] for one in published] == ["short of memory"]
    assert published[0] == record.fields()
    record.stop()
    assert record.state == "stopping"
    engine.stop()
    assert engine.join(5)


def test_loading_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are read in groups, each of which is said; the last word is that all are there."""
    monkeypatch.setattr(model, "READ_BYTES", 1_000_000)
    said: list[str] = []
    with loading.listening(said.append):
        model.load("demo")
    assert said[0] == "loading" and len(said) > 3
    total = said[-1].split(" of ")[1]
    assert said[-1] == f"loading {total.split()[0]} of {total}"
    assert all(text.endswith(f" of {total}") for text in said[1:])


def test_a_download_says_how_far_it_is() -> None:
    """The bytes that are there, of both bars that count them; before that the number of files."""
    said: list[str] = []
    with loading.listening(said.append):
        kind = loading.download_bar()
    files, came, written = kind(total=12), kind(total=0, unit="B"), kind(total=0, unit="B")
    files.update(1)
    came.total = written.total = 7_300_000_000
    came.update(2_100_000_000)
    written.update(1_000_000_000)
    written.update(2_000_000_000)
    files.update(1)
    for bar in (files, came, written):
        bar.close()
    assert said == [
        "downloading file 2 of 12",
        "downloading 2.1 of 7.3 GB",
        "downloading 3.0 of 7.3 GB",
    ]


def test_what_is_said_of_loading_needs_no_listener() -> None:
    """Whoever loads a model elsewhere hears nothing, and nothing breaks."""
    loading.report("loading")
    assert loading.amount(10, 500) == "10 of 500 bytes"


def test_the_engine_thread_keeps_the_last_word() -> None:
    """While the engine is built its words can be read; once it is there they are gone."""
    texts: list[str] = []

    def build() -> FakeEngine:
        loading.report("loading 1.0 of 2.0 GB")
        texts.append(thread.loading)
        return FakeEngine(1, 0, FakePlan())

    thread = EngineThread(build)
    assert thread.memory_bytes == 0
    thread.start()
    wait_until(lambda: thread.max_in_flight == 1)
    thread.stop()
    assert texts == ["loading 1.0 of 2.0 GB"] and thread.loading == ""


@pytest.mark.parametrize("fault", ["", "numpy is not installed"])
def test_a_worker_without_the_library_does_not_claim_grammars(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Its record claims everything else; with the library, all that this version knows."""
    monkeypatch.setattr(abilities, "why_not", lambda: fault)
    claimed = constant_fields()["bkv_abilities"].split()
    wanted = [name for name in ABILITIES if name != "grammar" or not fault]
    assert claimed == wanted and "fields" in claimed


def test_the_first_write_of_a_record_has_the_abilities(redis_connection: Redis) -> None:
    """Without them a worker that starts would be called one of an older version."""
    worker = BatchWorker(["batchkv:m"], connection=redis_connection, prepare_for_work=False)
    worker.birth_date = worker.last_heartbeat = datetime.now(UTC)
    assert constant_fields().items() <= worker.serialize().items()
