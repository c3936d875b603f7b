"""Where a worker's time goes: the file of ``--trace``."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from batchkv_worker import trace
from batchkv_worker.engine.engine import Engine, EngineConfig
from batchkv_worker.events import Completed
from batchkv_worker.sequence import Generation, Sequence
from batchkv_worker.trace import (
    AHEAD,
    DECODE,
    END,
    ENGINE,
    IDLE,
    LOAD,
    MAIN,
    MEASURE,
    PREFILL,
    PREPARE,
    REDIS,
    START,
    Trace,
    Track,
)
from support import tiny_models
from support.homes import new_home
from support.worker_harness import WorkerProcess, num_ended, submit, wait_until, workers

Event = dict[str, Any]


def read(path: Path) -> list[Event]:
    """The events of a trace, of one whose writer was killed, too: the format allows that."""
    text = path.read_text("utf-8")
    found: list[Event] = json.loads(text if text.endswith("]\n") else text + "]")
    return found


def phases(events: list[Event], track: int) -> dict[str, float]:
    """Seconds by phase of one track."""
    seconds: dict[str, float] = defaultdict(float)
    for event in events:
        if event["ph"] == "X" and event["tid"] == track:
            seconds[event["name"]] += event["dur"] / 1e6
    return dict(seconds)


def span(events: list[Event], track: int) -> float:
    """Seconds from a track's first event to the end of its last, none overlapping another."""
    found = [event for event in events if event["ph"] == "X" and event["tid"] == track]
    for before, after in pairwise(found):
        assert after["ts"] == pytest.approx(before["ts"] + before["dur"], abs=2)
    return float(found[-1]["ts"] + found[-1]["dur"] - found[0]["ts"]) / 1e6


class Clock:
    """Seconds that go on when told to."""

    now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def track() -> Track:
    """A thread's phases. Not the process's own, because threads of earlier tests still end."""
    return Track(ENGINE.number, "engine")


def traced(path: Path, clock: Clock, *tracks: Track) -> Trace:
    opened = Trace(path.open("w", encoding="utf-8"), tracks, clock)
    opened.begin("test")
    return opened


def test_short_stretches_become_one_event_and_keep_their_sum(
    tmp_path: Path, clock: Clock, track: Track
) -> None:
    """A thousand turns of two phases are a few events that fill the time; a long one stays one."""
    path = tmp_path / "t.json"
    opened = traced(path, clock, track)
    for _ in range(1000):
        for phase, seconds in ((PREFILL, 0.002), (DECODE, 0.008)):
            track.enter(phase)
            clock.now += seconds
    track.enter(IDLE)
    clock.now += 5.0
    track.enter(None)
    opened.close()
    events = read(path)
    assert len(events) < 40
    assert phases(events, track.number) == pytest.approx({PREFILL: 2.0, DECODE: 8.0, IDLE: 5.0})
    assert span(events, track.number) == pytest.approx(15.0)
    assert sum(event["args"].get("stretches", 0) for event in events) == 2001


def test_a_pause_between_short_stretches_stands_where_it_was(
    tmp_path: Path, clock: Clock, track: Track
) -> None:
    """What is not short is an event of its own, at its own time, whatever surrounds it."""
    path = tmp_path / "t.json"
    opened = traced(path, clock, track)
    for phase, seconds in ((DECODE, 0.01), (PREFILL, 0.02), (IDLE, 0.3), (DECODE, 0.01)):
        track.enter(phase)
        clock.now += seconds
    track.enter(None)
    opened.close()
    found = [event for event in read(path) if event["ph"] == "X"]
    assert [event["name"] for event in found] == [DECODE, PREFILL, IDLE, DECODE]
    assert found[2]["ts"] - found[0]["ts"] == pytest.approx(30_000, abs=2)
    assert found[2]["dur"] == pytest.approx(300_000, abs=2)


def test_a_thread_that_waits_is_written_by_another(
    tmp_path: Path, clock: Clock, track: Track
) -> None:
    """What a thread has been doing for long stands in the file although it does not come round."""
    path = tmp_path / "t.json"
    other = Track(MAIN.number, "main")
    opened = traced(path, clock, track, other)
    track.enter(LOAD)
    for _ in range(300):
        other.enter(IDLE)
        clock.now += 0.1
        other.enter(REDIS)
    told = phases(read(path), track.number)[LOAD]
    opened.close()
    assert told > 15.0
    assert phases(read(path), track.number)[LOAD] == pytest.approx(30.0)


def test_a_file_grows_slower_and_slower(
    tmp_path: Path, clock: Clock, track: Track, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice the time needs far less than twice the events, once there are many."""
    monkeypatch.setattr(trace, "EVENTS_PER_DOUBLING", 100)
    path, counts = tmp_path / "t.json", []
    opened = traced(path, clock, track)
    for turn in range(40_000):
        track.enter((PREFILL, DECODE)[turn % 2])
        clock.now += 0.1
        if turn in (19_999, 39_999):
            counts.append(len(read(path)))
    opened.close()
    assert counts[1] < 1.3 * counts[0] < 1300


def test_nothing_is_traced_unless_asked(tmp_path: Path, clock: Clock, track: Track) -> None:
    """Without a file a phase is nothing, and after the end it is nothing again."""
    traced(tmp_path / "t.json", clock, track).close()
    assert not track.is_traced
    assert track.enter(DECODE) is None and track.enter(IDLE) is None


def test_a_trace_that_cannot_be_written_ends_alone(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk costs the trace, with a word in the log, and nothing else."""
    trace.open_trace("/dev/full", "test", clock)
    for phase in (PREFILL, DECODE, IDLE):
        ENGINE.enter(phase)
        clock.now += 20.0
    trace.close_trace()
    assert caplog.text.count("the trace ends here") == 1


def test_a_demo_run_tells_where_its_time_went(tmp_path: Path) -> None:
    """``batchkv run`` has its worker write every phase, and the sums fill the time."""
    home = new_home(Path(tempfile.mkdtemp(prefix="bkv-trace-", dir="/tmp")))
    source = tmp_path / "in.txt"
    source.write_text("".join(f"Say {number}.\n" for number in range(24)))
    path, cli = tmp_path / "t.json", [sys.executable, "-P", "-m", "batchkv_producer"]
    words = ["run", str(source), "-m", "demo", "--max-tokens", "8"]
    environment = {"BATCHKV_HOME": str(home), "PATH": "/usr/bin:/bin", "BATCHKV_TRACE": str(path)}
    try:
        done = subprocess.run([*cli, *words], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    finally:
        subprocess.run([*cli, "server", "stop"], env=environment, capture_output=True)
        shutil.rmtree(home)
    assert path.read_text().endswith("]\n")
    events = read(path)
    engine, main = phases(events, ENGINE.number), phases(events, MAIN.number)
    assert set(engine) == {START, LOAD, MEASURE, PREPARE, PREFILL, DECODE, IDLE, END}
    assert sum(engine.values()) == pytest.approx(span(events, ENGINE.number), abs=1e-3)
    assert sum(main.values()) == pytest.approx(span(events, MAIN.number), abs=1e-3)
    assert set(main) == {START, IDLE, REDIS}
    ahead = phases(events, AHEAD.number)
    assert set(ahead) == {PREPARE, IDLE}
    assert sum(ahead.values()) == pytest.approx(span(events, AHEAD.number), abs=1e-3)
    assert sum(main.values()) > sum(engine.values())  # it starts the other, and ends it
    assert any(event["ph"] == "C" and event["args"]["peak_mb"] > 1 for event in events)


def test_a_worker_that_is_stopped_or_killed_leaves_a_trace(
    redis_connection: Redis, redis_url: str, tmp_path: Path
) -> None:
    """SIGTERM ends the file's array; after kill -9 only its end is missing."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        path = tmp_path / f"{number}.json"
        batch = submit(redis_connection, ["p"] * 20, name=str(number))
        started = WorkerProcess(redis_url, tmp_path / "log", settings={"TRACE": path})
        with workers(started) as (worker,):
            wait_until(lambda batch=batch: num_ended(redis_connection, batch) == 20)
            wait_until(lambda path=path: DECODE in phases(read(path), ENGINE.number))
            worker.process.send_signal(number)
            worker.wait()
        assert path.read_text().endswith("]\n") == (number == signal.SIGTERM)
        assert DECODE in phases(read(path), ENGINE.number)


def test_a_file_that_cannot_be_is_refused(redis_url: str, tmp_path: Path) -> None:
    """The error names the flag, the file and why, and the exit code is that of a bad setting."""
    settings = {"TRACE": tmp_path / "none" / "t.json"}
    with workers(WorkerProcess(redis_url, tmp_path / "log", settings=settings)) as (worker,):
        assert worker.wait() == 2
    assert f"--trace {settings['TRACE']}: it cannot be written: No such file" in worker.said


def test_tracing_changes_no_token(tmp_path: Path) -> None:
    """Waiting for chunks before the step behind them gives the same answers, and is told."""

    def answers() -> dict[str, tuple[int, ...]]:
        engine = Engine(tiny_models.loaded(model), config)
        for index in range(12):
            prompt = [(7 * index + at) % 50 for at in range(20 + 37 * index)]
            engine.submit_row(Sequence(str(index), prompt, Generation(6, temperature=0.0)))
        found = {}
        while not engine.is_idle:
            ENGINE.enter(DECODE)
            for event in engine.step():
                assert isinstance(event, Completed)
                found[event.job_id] = event.token_ids
        engine.close()
        return found

    model = tiny_models.build("llama")
    config = EngineConfig("float", slots=4, memory_bytes=2**27, path="fused", group_cost=64)
    plain, path = answers(), tmp_path / "t.json"
    trace.open_trace(str(path), "test")
    told = answers()
    trace.close_trace()
    assert told == plain
    assert phases(read(path), ENGINE.number).keys() >= {PREFILL, DECODE}
