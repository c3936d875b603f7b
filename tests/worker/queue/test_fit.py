"""A worker and the rows that it may compute: what it passes by, stores, and says of itself."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from redis import Redis

from batchkv_producer.wire import redis_keys
from batchkv_worker.errors import EXIT_MODEL_CHANGED
from support.fake_engine import FakePlan
from support.worker_harness import (
    QUEUE,
    assert_reconciled,
    num_ended,
    results_of,
    submit,
    wait_until,
    waiting_lines,
)
from worker.queue.test_rq_worker import make_worker, work

OURS, THEIRS = "a" * 32, "b" * 32


def bind(connection: Redis, batch: str, **fields: str) -> None:
    """Say what a batch is computed with."""
    connection.hset(redis_keys.batch(batch), mapping=fields)


def test_results_and_the_workers_record_say_what_made_them(redis_connection: Redis) -> None:
    """The batch learns it from its first worker; each result keeps fingerprint and scheme."""
    batch = submit(redis_connection, ["a", "b"])
    said: list[bytes | None] = []

    def act() -> None:
        wait_until(lambda: num_ended(redis_connection, batch) == 2)
        key = redis_keys.worker(worker.name)
        wait_until(lambda: redis_connection.hget(key, "bkv_fingerprint") == OURS.encode())
        said.extend(redis_connection.hmget(key, "bkv_scheme", "bkv_dtype"))
        worker.request_stop(15, None)

    worker = make_worker(redis_connection, FakePlan(fingerprint=OURS), heartbeat_seconds=0.2)
    work(worker, act)
    assert said == [b"affine8", b"float32"]
    made = {(row.fingerprint, row.scheme) for row in results_of(redis_connection, batch).values()}
    assert made == {(OURS, "affine8")}
    found = redis_connection.hmget(redis_keys.batch(batch), "fingerprint", "scheme", "dtype")
    assert found == [OURS.encode(), b"affine8", b"float32"]


def test_rows_for_others_are_left_and_do_not_keep_a_burst(redis_connection: Redis) -> None:
    """What fits is done, what does not waits in its place, and no death is counted."""
    theirs = submit(redis_connection, ["a"] * 3, name="theirs")
    bind(redis_connection, theirs, fingerprint=THEIRS)
    ours = submit(redis_connection, ["b"] * 3, name="ours")
    worker = make_worker(redis_connection, FakePlan(fingerprint=OURS))
    work(worker)
    assert_reconciled(redis_connection, ours)
    assert num_ended(redis_connection, theirs) == 0
    assert waiting_lines(redis_connection) == [1, 2, 3]


def test_a_burst_looks_behind_all_that_has_ended(redis_connection: Redis) -> None:
    """However many ids of jobs that are gone come first, it does the rows behind them."""
    batch = submit(redis_connection, ["a"] * 3)
    for start in range(0, 10_000, 1000):
        ids = [f"{'f' * 16}-{line}" for line in range(start + 1, start + 1001)]
        redis_connection.lpush(redis_keys.queue(QUEUE), *ids)
    work(make_worker(redis_connection))
    assert_reconciled(redis_connection, batch)
    assert num_ended(redis_connection, batch) == 3


def test_a_worker_that_only_passes_rows_by_asks_once_a_second(redis_connection: Redis) -> None:
    """It neither spins nor sleeps through what comes for it."""
    theirs = submit(redis_connection, ["a"] * 3, name="theirs")
    bind(redis_connection, theirs, fingerprint=THEIRS)
    ours: list[str] = []

    def num_commands() -> int:
        return int(redis_connection.info("stats")["total_commands_processed"])

    def act() -> None:
        key = redis_keys.worker(worker.name)
        wait_until(lambda: redis_connection.hget(key, "state") == b"idle")
        before = num_commands()
        time.sleep(1.5)
        assert num_commands() - before < 150
        ours.append(submit(redis_connection, ["b"] * 3, name="ours"))
        wait_until(lambda: num_ended(redis_connection, ours[0]) == 3)
        worker.request_stop(15, None)

    worker = make_worker(redis_connection, FakePlan(fingerprint=OURS))
    work(worker, act)


def test_a_backlog_does_not_yield_to_urgent_rows_of_others(redis_connection: Redis) -> None:
    """High rows that another worker must compute are no reason to give anything back."""
    theirs = submit(redis_connection, ["a"] * 3, name="theirs")
    bind(redis_connection, theirs, scheme="float", priority="high")
    high, normal = (redis_keys.waiting(QUEUE, name) for name in ("high", "normal"))
    redis_connection.rename(normal, high)
    ours = submit(redis_connection, ["slow:15"] * 60, name="ours")

    def act() -> None:
        wait_until(
            lambda: num_ended(redis_connection, ours) and not redis_connection.exists(normal)
        )
        until = time.monotonic() + 1.5  # a look at the queue is due each second
        while time.monotonic() < until:
            assert not redis_connection.exists(normal)

    plan = FakePlan(fingerprint=OURS, step_seconds=0.02)
    worker = make_worker(redis_connection, plan, slots=2, prefetch=1, drain_seconds=0)
    work(worker, act)


def test_a_worker_whose_model_changed_on_disk_ends_to_be_started_again(
    redis_connection: Redis, tmp_path: Path
) -> None:
    """It finishes what has started, gives back the rest, and ends with a code of its own."""
    changed = tmp_path / "changed"
    ours = submit(redis_connection, ["slow:30"] * 2, name="ours")
    plan = FakePlan(fingerprint=OURS, step_seconds=0.02, changed=str(changed))
    worker = make_worker(redis_connection, plan)

    def act() -> None:
        wait_until(lambda: redis_connection.hget(redis_keys.batch(ours), "running") == b"2")
        changed.touch()
        theirs = submit(redis_connection, ["a"] * 3, name="theirs")
        bind(redis_connection, theirs, fingerprint=THEIRS)

    thread = threading.Thread(target=act)
    thread.start()
    with pytest.raises(SystemExit) as ending:
        worker.work(logging_level="INFO")
    thread.join()
    assert ending.value.code == EXIT_MODEL_CHANGED
    assert num_ended(redis_connection, ours) == 2
    assert waiting_lines(redis_connection) == [1, 2, 3]
