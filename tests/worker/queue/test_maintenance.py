"""What some worker does for the queue now and then, and that only one does it at a time."""

from __future__ import annotations

import time
from threading import Thread
from typing import Any

import pytest
from redis import Redis
from rq import Queue
from rq.job import Job
from rq.serializers import JSONSerializer

from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.job import ErrorCode, decode_result
from batchkv_producer.wire.transitions import MAX_DEATHS, Transitions
from batchkv_worker.queue import maintenance, session
from batchkv_worker.queue.maintenance import Maintenance
from batchkv_worker.queue.rq_worker import BatchWorker
from batchkv_worker.settings import WorkerSettings
from support.fake_engine import FakeEngine, FakePlan, rows_of
from support.redis_server import RedisServer
from support.worker_harness import (
    MODEL,
    QUEUE,
    assert_reconciled,
    counts_of,
    results_of,
    submit,
    wait_until,
    waiting_lines,
)


def clean(connection: Redis) -> bool:
    """One round, whoever cleaned last."""
    connection.delete(redis_keys.maintenance_lock(QUEUE))
    return Maintenance(connection, QUEUE, "w").run(30)


def lapse(connection: Redis) -> None:
    """Let every lease end now."""
    wip = redis_keys.registry("wip", QUEUE)
    for member in connection.zrange(wip, 0, -1):
        connection.zadd(wip, {member: 1})


def rq_job(connection: Redis, job_id: str) -> Job:
    return Job.fetch(job_id, connection=connection, serializer=JSONSerializer)


def test_one_worker_cleans_in_an_interval(redis_connection: Redis) -> None:
    """The second comes too early; the lock expires by itself within the interval."""
    assert Maintenance(redis_connection, QUEUE, "a").run(30)
    assert not Maintenance(redis_connection, QUEUE, "b").run(30)
    left_ms = redis_connection.pttl(redis_keys.maintenance_lock(QUEUE))
    assert 0 < left_ms <= 30_000


class Worker(BatchWorker):
    """A worker on a fake engine."""

    @staticmethod
    def engine_factory(settings: WorkerSettings) -> FakeEngine:
        return FakeEngine(*rows_of(settings), FakePlan(step_seconds=0.002))


def test_who_cleans_for_long_keeps_its_leases(
    redis_server: RedisServer, redis_connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that has many batches' overdue rows to end renews its leases and stores its results
    meanwhile."""
    overdue = [submit(redis_connection, ["a"], name=f"late {n}") for n in range(10)]
    redis_connection.delete(redis_keys.queue(QUEUE))  # they are found by who cleans alone
    held = submit(redis_connection, ["slow:1000000"] * 3, name="held")
    settle = Transitions.settle

    def slowly(moves: Transitions, queue: str, target: str, rows: Any) -> list[str]:
        time.sleep(0.25 if target == "expired" else 0)
        return settle(moves, queue, target, rows)

    monkeypatch.setattr(Transitions, "settle", slowly)
    monkeypatch.setattr(session, "MAINTENANCE_SECONDS", 0.1)
    settings = WorkerSettings(MODEL, lease_seconds=2, heartbeat_seconds=0.4, drain_seconds=0)
    worker = Worker([QUEUE], connection=redis_connection, settings=settings)
    lost: list[tuple[int, int]] = []

    def watch() -> None:
        try:
            with redis_server.connect() as other:
                wait_until(lambda: counts_of(other, held)["running"] == 3)
                for batch in overdue:
                    other.hset(redis_keys.batch(batch), "expires", 1)
                other.delete(redis_keys.maintenance_lock(QUEUE))
                worker._session._maintenance_timer.at = 0.0
                while any(counts_of(other, batch)["failed"] == 0 for batch in overdue):
                    lost.append(Transitions(other).reap(QUEUE))
                    time.sleep(0.05)
        finally:
            wait_until(lambda: worker._stop is not None)
            worker.request_stop(15, None)

    watcher = Thread(target=watch)
    watcher.start()
    worker.work()
    watcher.join()
    assert set(lost) == {(0, 0)}


def test_leases_of_the_living_outlast_a_step_of_the_servers_clock(redis_connection: Redis) -> None:
    """When the server's clock is set forward by an hour, or its Mac wakes up, nothing is taken back
    for the length of a lease; then what nobody has renewed is."""
    batch = submit(redis_connection, ["a", "b"])
    moves = Transitions(redis_connection)
    (alive,), (dead,) = moves.pull(QUEUE, "alive", 1, 60), moves.pull(QUEUE, "dead", 1, 60)
    keeper = Maintenance(redis_connection, QUEUE, "w", lease_seconds=0.2)
    assert keeper.run(30)
    seen = keeper._clock._seen
    assert seen is not None
    keeper._clock._seen = (seen[0] - 3600, seen[1])
    lapse(redis_connection)
    redis_connection.delete(redis_keys.maintenance_lock(QUEUE))
    assert not keeper.run(30)
    assert counts_of(redis_connection, batch)["running"] == 2
    moves.renew(QUEUE, "alive", [alive.lease], 60, 60)

    def has_cleaned() -> bool:
        redis_connection.delete(redis_keys.maintenance_lock(QUEUE))
        return keeper.run(30)

    wait_until(has_cleaned)
    assert waiting_lines(redis_connection) == [2]
    assert moves.renew(QUEUE, "dead", [dead.lease], 60, 60)


def test_leases_of_the_dead_lapse_although_the_servers_clock_was_set_back(
    redis_connection: Redis,
) -> None:
    """Leases and the cleaner's lock from before an hour's step back last no longer than they would
    have; a longer lease of a worker that lives is as long as it was."""
    submit(redis_connection, ["a", "b"])
    moves = Transitions(redis_connection)
    (dead,), (long,) = moves.pull(QUEUE, "dead", 1, 60), moves.pull(QUEUE, "long", 1, 900)
    lock, wip = redis_keys.maintenance_lock(QUEUE), redis_keys.registry("wip", QUEUE)
    member = f"{dead.lease.job_id}:{dead.lease.execution}"
    redis_connection.set(lock, "dead", ex=3600 + 27)
    redis_connection.zincrby(wip, 3600, member)
    redis_connection.hset(f"rq:execution:{member}", "last_heartbeat", time.time() + 3600)
    assert Maintenance(redis_connection, QUEUE, "w", lease_seconds=60).run(30)
    assert redis_connection.zscore(wip, member) - time.time() < 61
    assert redis_connection.ttl(lock) <= 27
    member = f"{long.lease.job_id}:{long.lease.execution}"
    assert redis_connection.zscore(wip, member) - time.time() > 800


def test_lapsed_leases_go_back_to_the_queue(redis_connection: Redis) -> None:
    """Jobs of a worker that is gone are queued again, at the head and in order."""
    batch = submit(redis_connection, ["a", "b", "c"])
    Transitions(redis_connection).pull(QUEUE, "dead", 2, 60)
    lapse(redis_connection)
    assert clean(redis_connection)
    ids = [f"{batch}-{line}".encode() for line in (1, 2, 3)]
    assert redis_connection.lrange(redis_keys.queue(QUEUE), 0, -1) == ids
    assert counts_of(redis_connection, batch)["running"] == 0


def test_a_job_that_cost_too_many_workers_gets_its_row(redis_connection: Redis) -> None:
    """Each lapse is half a death; after one beside others and MAX_DEATHS alone it fails with
    engine_error and its own custom_id."""
    batch = submit(redis_connection, ["poison"])
    for _ in range(2 * (1 + MAX_DEATHS)):
        assert results_of(redis_connection, batch) == {}
        assert len(Transitions(redis_connection).pull(QUEUE, "dead", 1, 60)) == 1
        lapse(redis_connection)
        assert clean(redis_connection)
    result = results_of(redis_connection, batch)[1]
    assert result.error is not None
    assert result.error[0] == ErrorCode.ENGINE_ERROR
    assert (result.custom_id, result.endpoint) == ("c1", "completion")
    assert_reconciled(redis_connection, batch)


def test_an_engines_deaths_are_counted_too(redis_connection: Redis) -> None:
    """A row that kills the engine each time it is tried ends as failed, not in a circle."""
    batch = submit(redis_connection, ["poison"])
    moves = Transitions(redis_connection)
    for _ in range(MAX_DEATHS + 1):
        [pulled] = moves.pull(QUEUE, "w", 1, 60)
        moves.give_back(QUEUE, [pulled.lease], died=True)
    assert moves.pull(QUEUE, "w", 1, 60) == []
    assert clean(redis_connection)
    assert counts_of(redis_connection, batch)["failed"] == 1
    assert_reconciled(redis_connection, batch)


def test_a_job_that_rq_failed_gets_its_row(redis_connection: Redis) -> None:
    """RQ's own tools may fail an abandoned job behind our back: its row says so."""
    batch = submit(redis_connection, ["a", "b"])
    for job in Transitions(redis_connection).pull(QUEUE, "dead", 2, 60):
        redis_connection.hset(redis_keys.job(job.lease.job_id), "retries_left", 0)
    lapse(redis_connection)
    Queue(
        QUEUE, connection=redis_connection, serializer=JSONSerializer
    ).started_job_registry.cleanup()
    assert clean(redis_connection)
    assert counts_of(redis_connection, batch)["failed"] == 2
    assert_reconciled(redis_connection, batch)


def test_a_job_that_rq_canceled_gets_its_row(redis_connection: Redis) -> None:
    """A job canceled with RQ's own means would leave its batch short of a row for ever."""
    batch = submit(redis_connection, ["a"])
    rq_job(redis_connection, f"{batch}-1").cancel()
    assert clean(redis_connection)
    result = decode_result(redis_connection.hget(redis_keys.results(batch), "1"))
    assert result.error is not None
    assert result.error[0] == ErrorCode.CANCELED


def test_a_job_that_somebody_holds_is_not_healed(redis_connection: Redis) -> None:
    """RQ may call a job failed whose holder is alive: the holder ends it."""
    batch = submit(redis_connection, ["a"])
    [pulled] = Transitions(redis_connection).pull(QUEUE, "alive", 1, 60)
    redis_connection.hset(redis_keys.job(pulled.lease.job_id), "status", "failed")
    redis_connection.zadd(redis_keys.registry("failed", QUEUE), {pulled.lease.job_id: 9e9})
    assert clean(redis_connection)
    assert results_of(redis_connection, batch) == {}


def test_every_page_of_the_registry_is_looked_at(redis_connection: Redis) -> None:
    """Old ids are reached in a few rounds, whatever lies on top of them."""
    batch = submit(redis_connection, [f"p{i}" for i in range(40)])
    Transitions(redis_connection).pull(QUEUE, "dead", 40, 60)
    for line in range(1, 41):
        job_id = f"{batch}-{line}"
        redis_connection.hset(redis_keys.job(job_id), mapping={"status": "failed"})
        redis_connection.hdel(redis_keys.job(job_id), "bkv_exec")
        redis_connection.zadd(redis_keys.registry("failed", QUEUE), {job_id: 2e9 + line})
    keeper = Maintenance(redis_connection, QUEUE, "w")
    original, maintenance.PAGE = maintenance.PAGE, 10
    try:
        for _ in range(4):
            redis_connection.delete(redis_keys.maintenance_lock(QUEUE))
            keeper.run(30)
    finally:
        maintenance.PAGE = original
    assert len(results_of(redis_connection, batch)) == 40


def test_registries_forget_what_has_expired(redis_connection: Redis) -> None:
    """Ids whose time is over leave RQ's registries; the others stay."""
    for kind in ("finished", "failed", "canceled"):
        redis_connection.zadd(redis_keys.registry(kind, QUEUE), {"old": 1, "new": 9e9})
    clean(redis_connection)
    for kind in ("finished", "failed", "canceled"):
        assert redis_connection.zrange(redis_keys.registry(kind, QUEUE), 0, -1) == [b"new"]


def test_a_worker_whose_clock_is_ahead_forgets_nothing(
    redis_connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has expired is told by the server's clock, not by that of the worker that cleans."""
    now = time.time()
    key = redis_keys.registry("failed", QUEUE)
    redis_connection.zadd(key, {"kept": now + 3600, "gone": now - 3600})
    monkeypatch.setattr(time, "time", lambda: now + 8 * 86_400)
    assert clean(redis_connection)
    assert redis_connection.zrange(key, 0, -1) == [b"kept"]


def test_dead_workers_leave_rqs_lists(redis_connection: Redis) -> None:
    """A worker whose record has expired is no longer counted."""
    for key in ("rq:workers", f"rq:workers:{QUEUE}"):
        redis_connection.sadd(key, "rq:worker:gone", "rq:worker:here")
    redis_connection.hset("rq:worker:here", "birth", "x")
    clean(redis_connection)
    assert redis_connection.smembers("rq:workers") == {b"rq:worker:here"}
    assert redis_connection.smembers(f"rq:workers:{QUEUE}") == {b"rq:worker:here"}


def test_ids_that_are_not_ours_are_left_alone(redis_connection: Redis) -> None:
    """A foreign job in the failed registry gets no row and breaks nothing."""
    redis_connection.zadd(redis_keys.registry("failed", QUEUE), {"1b2c-foreign": 9e9, b"\xff": 9e9})
    assert clean(redis_connection)
    assert redis_connection.keys("batchkv:res:*") == []
