"""A drained worker: a real process and a real queue."""

from __future__ import annotations

import signal
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
from support.worker_harness import (
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
PLAN: dict[str, object] = {"step_seconds": 0.02}


def only(connection: Redis) -> WorkerInfo:
    (found,) = read_workers(connection)
    return found


def num_leases(connection: Redis) -> int:
    return int(connection.zcard(redis_keys.registry("wip", QUEUE)))


def test_a_drained_worker_ends_its_rows_takes_none_and_lives(
    redis_connection: Redis, redis_url: str, tmp_path: Path
) -> None:
    """Rows that wait go back, started ones end. A server that loses the record changes nothing.
    Once resumed, the worker does the rest."""
    batch = submit(redis_connection, ["slow:12"] * 10)
    worker = WorkerProcess(redis_url, tmp_path / "log", plan=PLAN, settings=SETTINGS)
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
    worker = WorkerProcess(redis_url, tmp_path / "log", plan=PLAN, settings=SETTINGS)
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
