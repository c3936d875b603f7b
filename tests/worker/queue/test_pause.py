"""Workers that take no rows for now: on battery, with a planted power source, or drained.

The processes and the queue are real.
"""

from __future__ import annotations

import logging
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from redis import Redis

from batchkv_producer.errors import NotFoundError, RefusedError
from batchkv_producer.local import draining
from batchkv_producer.manage import drain as orders
from batchkv_producer.monitor.delays import find_delay
from batchkv_producer.monitor.status import read_batch
from batchkv_producer.monitor.workers import WorkerInfo, read_workers
from batchkv_producer.wire import redis_keys
from batchkv_worker.queue.pause import Pause, PowerWatch
from support.fake_mac import ON_BATTERY, ON_MAINS, FakeMac
from support.worker_harness import (
    MODEL,
    QUEUE,
    QUICK_LEASES,
    WorkerProcess,
    assert_reconciled,
    counts_of,
    num_ended,
    submit,
    wait_until,
    workers,
)

SETTINGS = {**QUICK_LEASES, "SLOTS": 2, "PREFETCH": 2}
OWN = (sys.executable, "-P", "-m", "support.fake_engine")  # `batchkv worker`
STEADY: dict[str, object] = {"step_seconds": 0.02}
PLAN: dict[str, object] = {"platform": "darwin", "power_poll_seconds": 0.05, "step_seconds": 0.02}


@pytest.fixture
def mac(tmp_path: Path) -> FakeMac:
    """A Mac on mains."""
    return FakeMac(tmp_path / "mac").install()


@contextmanager
def polite_worker(
    redis_url: str, mac: FakeMac, grace_seconds: float, *command: str
) -> Iterator[WorkerProcess]:
    """A worker process on that Mac."""
    worker = WorkerProcess(
        redis_url,
        mac.folder / "log",
        *(("-m", MODEL, "--polite") if command else ()),
        plan={**PLAN, "grace_seconds": grace_seconds},
        settings=SETTINGS | ({} if command else {"POLITE": "on"}),
        environ={"PATH": mac.path},
        command=command,
    )
    with workers(worker):
        yield worker


def num_leases(connection: Redis) -> int:
    return int(connection.zcard(redis_keys.registry("wip", QUEUE)))


def doing(connection: Redis) -> list[str]:
    return [worker.shown_state for worker in read_workers(connection)]


def num_deaths(connection: Redis, batch: str, num_rows: int) -> int:
    keys = [redis_keys.job(f"{batch}-{line}") for line in range(1, num_rows + 1)]
    return sum(int(connection.hget(key, "bkv_died") or 0) for key in keys)


def test_started_rows_end_and_the_others_go_back(
    redis_connection: Redis, redis_url: str, mac: FakeMac
) -> None:
    """On battery the rows in slots end; backlog and waiting rows go back; mains bring them again.

    Meanwhile the worker holds no lease, its heartbeat and RQ's state say why, and the Mac may
    sleep.
    """
    batch = submit(redis_connection, ["slow:25"] * 12)
    with polite_worker(redis_url, mac, grace_seconds=30) as worker:
        wait_until(lambda: num_ended(redis_connection, batch) >= 2)
        wait_until(lambda: mac.awake)
        assert mac.awake[0][1] == f"-i -w {worker.process.pid}"
        mac.plant(ON_BATTERY)
        wait_until(lambda: doing(redis_connection) == ["paused: on battery"])
        wait_until(lambda: num_leases(redis_connection) == 0)
        wait_until(lambda: read_workers(redis_connection)[0].state == "suspended")
        assert mac.awake == []
        num_before = num_ended(redis_connection, batch)
        assert num_before < 12
        assert counts_of(redis_connection, batch)["ok"] == num_before
        mac.plant(ON_MAINS)
        wait_until(lambda: num_ended(redis_connection, batch) == 12)
        wait_until(lambda: doing(redis_connection) == ["idle"])
        wait_until(lambda: mac.awake)
        worker.process.send_signal(signal.SIGTERM)
        assert worker.wait() == 0
    assert_reconciled(redis_connection, batch)
    assert counts_of(redis_connection, batch)["ok"] == 12
    assert mac.awake == []
    assert "started jobs back" not in worker.said


def test_rows_that_do_not_end_in_time_go_back(
    redis_connection: Redis, redis_url: str, mac: FakeMac
) -> None:
    """After the grace time the rows in slots are given back, without a death, and taken again."""
    batch = submit(redis_connection, ["slow:3", *["slow:500"] * 4])
    with polite_worker(redis_url, mac, grace_seconds=0.1) as worker:
        wait_until(lambda: num_ended(redis_connection, batch) == 1)  # so the engine has begun
        wait_until(lambda: counts_of(redis_connection, batch)["running"] == 4)
        mac.plant(ON_BATTERY)
        # The second of two slots may have been filled a moment later.
        wait_until(lambda: re.search("gave [12] started jobs back", worker.said) is not None)
        wait_until(lambda: num_leases(redis_connection) == 0)
        assert counts_of(redis_connection, batch)["running"] == 0
        assert num_ended(redis_connection, batch) == 1
        assert num_deaths(redis_connection, batch, 5) == 0
        mac.plant(ON_MAINS)
        wait_until(lambda: counts_of(redis_connection, batch)["running"] == 4)
    assert num_ended(redis_connection, batch) == 1


def test_a_worker_that_starts_on_battery_takes_nothing(
    redis_connection: Redis, redis_url: str, mac: FakeMac
) -> None:
    """`batchkv worker --polite` loads, says that it is paused, and ends when it is asked to."""
    mac.plant(ON_BATTERY)
    batch = submit(redis_connection, ["a"] * 3)
    with polite_worker(redis_url, mac, 30, *OWN) as worker:
        wait_until(lambda: doing(redis_connection) == ["paused: on battery"])
        wait_until(lambda: "the engine is ready" in worker.said)
        assert counts_of(redis_connection, batch)["running"] == 0
        worker.process.send_signal(signal.SIGTERM)
        assert worker.wait() == 0
    assert num_ended(redis_connection, batch) == 0


class Source:
    """A power source that answers what was planted, an error included."""

    def __init__(self, answer: bool | OSError) -> None:
        self.answer = answer
        self.asked = threading.Event()

    def __call__(self) -> bool:
        self.asked.set()
        if isinstance(self.answer, OSError):
            raise self.answer
        return self.answer


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Source], PowerWatch]]:
    """Start a watch that asks often."""
    monkeypatch.setattr(PowerWatch, "POLL_SECONDS", 0.01)
    started: list[PowerWatch] = []

    def start(source: Source) -> PowerWatch:
        made = PowerWatch(source, lambda: None)
        made.start()
        started.append(made)
        return made

    yield start
    for each in started:
        each.stop()


def test_nothing_is_taken_before_the_first_answer() -> None:
    """A watch that has no answer yet keeps the worker from taking rows; none lets it."""
    assert not Pause(PowerWatch(lambda: False, lambda: None)).may_work
    assert Pause().may_work and not Pause().is_grace_over and Pause().text == ""


def test_an_unknown_source_does_not_pause(
    watch: Callable[[Source], PowerWatch], caplog: pytest.LogCaptureFixture
) -> None:
    """A machine whose source cannot be asked works, and the log says so once."""
    source = Source(OSError("no pmset"))
    with caplog.at_level(logging.WARNING, "batchkv.worker"):
        pause = Pause(watch(source))
        wait_until(lambda: pause.may_work)
        source.asked.clear()
        assert source.asked.wait(10)
    assert not pause.look(0)
    assert len(caplog.records) == 1 and "no pmset" in caplog.text


def test_a_pause_begins_and_ends_with_the_source(watch: Callable[[Source], PowerWatch]) -> None:
    """Its beginning is reported once; its text and its grace time end with it."""
    source = Source(True)
    pause = Pause(watch(source))
    wait_until(lambda: pause.look(3))
    assert not pause.look(3)
    assert pause.text == "paused: on battery" and not pause.is_grace_over
    source.answer = False
    wait_until(lambda: not (pause.look(0) or pause.text))
    assert pause.may_work


# ---- drained workers ----


def only(connection: Redis) -> WorkerInfo:
    (found,) = read_workers(connection)
    return found


def test_a_drained_worker_ends_its_rows_takes_none_and_lives(
    redis_connection: Redis, redis_url: str, tmp_path: Path
) -> None:
    """Rows that wait go back, started ones end. A server that loses the record changes nothing.
    Once resumed, the worker does the rest."""
    batch = submit(redis_connection, ["slow:12"] * 10)
    worker = WorkerProcess(redis_url, tmp_path / "log", plan=STEADY, settings=SETTINGS)
    with workers(worker):
        wait_until(lambda: num_ended(redis_connection, batch) >= 2)
        name = only(redis_connection).name
        orders.drain(redis_connection, name)
        wait_until(lambda: only(redis_connection).shown_state == "drained")
        wait_until(lambda: only(redis_connection).state == "suspended")
        assert num_leases(redis_connection) == 0
        num_before = num_ended(redis_connection, batch)
        assert counts_of(redis_connection, batch)["ok"] == num_before < 10
        assert "started jobs back" not in worker.said
        status = read_batch(redis_connection, batch)
        delay = find_delay(status, [only(redis_connection)])
        assert delay is not None and delay.words == f"{name} is drained"
        assert f"batchkv workers --resume {name}" in delay.note
        redis_connection.delete(redis_keys.worker(name))  # as a server that was restarted
        wait_until(lambda: orders.is_ordered(redis_connection, name))
        wait_until(lambda: only(redis_connection).is_drained)
        assert num_ended(redis_connection, batch) == num_before
        orders.resume(redis_connection, name)
        wait_until(lambda: num_ended(redis_connection, batch) == 10)
        wait_until(lambda: only(redis_connection).shown_state == "idle")
        worker.process.send_signal(signal.SIGTERM)
        assert worker.wait() == 0
    assert_reconciled(redis_connection, batch)


def test_a_worker_of_this_machine_is_drained_without_rights(
    redis_connection: Redis, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A producer's user may not write a worker's record. On the worker's own machine a file in its
    home folder does the same; elsewhere the error names what to do."""
    redis_connection.execute_command("ACL", "SETUSER", "reader", "on", "nopass", "+@all", "%R~*")
    reader = Redis.from_url(redis_url, username="reader", password="any")
    batch = submit(redis_connection, ["slow:3"])
    worker = WorkerProcess(redis_url, tmp_path / "log", plan=STEADY, settings=SETTINGS)
    with workers(worker):
        wait_until(lambda: num_ended(redis_connection, batch) == 1)
        name = only(redis_connection).name
        monkeypatch.setenv("BATCHKV_HOME", str(tmp_path / "elsewhere"))
        with pytest.raises(RefusedError, match="the admin's URL, or run the command on the mach"):
            draining.drain(reader, name)
        monkeypatch.setenv("BATCHKV_HOME", str(tmp_path / "home"))
        draining.drain(reader, name)
        wait_until(lambda: only(redis_connection).shown_state == "drained")
        submit(redis_connection, ["slow:3"], name="more")
        orders.drain(redis_connection, name)
        with pytest.raises(RefusedError):  # an admin has drained it, too
            draining.resume(reader, name)
        orders.resume(redis_connection, name)
        wait_until(lambda: int(redis_connection.llen(redis_keys.queue(QUEUE))) == 0)
        draining.drain(reader, name)
        wait_until(lambda: only(redis_connection).shown_state == "drained")
        worker.process.send_signal(signal.SIGTERM)
        assert worker.wait() == 0
    assert list((tmp_path / "home" / "workers").iterdir()) == []
    redis_connection.execute_command("ACL", "DELUSER", "reader")


def test_a_worker_that_does_not_live_cannot_be_drained(redis_connection: Redis) -> None:
    """An unknown name is an error, and no record is left that would never expire."""
    with pytest.raises(NotFoundError, match="no worker ghost lives"):
        orders.drain(redis_connection, "ghost")
    assert not redis_connection.exists(redis_keys.worker("ghost"))
