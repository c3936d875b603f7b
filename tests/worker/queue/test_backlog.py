"""A run that the engine has no room for: held, renewed, started in order, given back, ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from rq.command import send_stop_job_command
from rq.serializers import JSONSerializer

from batchkv_producer.agreed import RUN_ROWS
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.transitions import Transitions
from batchkv_worker.queue import session
from batchkv_worker.queue.redis_side import RedisSide
from support.fake_engine import FakePlan
from support.redis_server import RedisServer, running_server
from support.worker_harness import (
    QUEUE,
    WorkerProcess,
    assert_reconciled,
    counts_of,
    num_ended,
    results_of,
    submit,
    wait_until,
    waiting_lines,
    workers,
)
from worker.queue.test_rq_worker import make_worker, work

SLOW = FakePlan(step_seconds=0.002)
QUEUE_KEY = redis_keys.queue(QUEUE)


@contextmanager
def another_worker(connection: Redis) -> Iterator[None]:
    """A worker that is registered and does nothing."""
    connection.sadd(f"rq:workers:{QUEUE}", "rq:worker:other")
    yield
    connection.srem(f"rq:workers:{QUEUE}", "rq:worker:other")


def test_a_worker_takes_a_run_and_no_more(redis_connection: Redis) -> None:
    """128 neighbours at once, though two fit into the engine; all count as running; a stop gives
    those back that have not started, at once and in their order."""
    batch = submit(redis_connection, ["slow:600"] * 300)

    def act() -> None:
        wait_until(lambda: counts_of(redis_connection, batch)["running"] == RUN_ROWS)
        time.sleep(0.3)
        assert counts_of(redis_connection, batch)["running"] == RUN_ROWS
        assert waiting_lines(redis_connection)[0] == RUN_ROWS + 1
        worker.request_stop(15, None)
        wait_until(lambda: counts_of(redis_connection, batch)["running"] <= 3)
        assert waiting_lines(redis_connection) == list(range(4, 301))

    worker = make_worker(redis_connection, SLOW, slots=2, prefetch=1)
    work(worker, act)
    counts = counts_of(redis_connection, batch)
    assert (counts["ok"], counts["running"]) == (3, 0)  # what had started was finished
    assert worker._session is not None
    assert worker._session.num_taken == 3


@pytest.mark.parametrize(("is_shared", "first_left"), [(True, 101), (False, RUN_ROWS + 1)])
def test_a_shared_queue_is_divided_between_prefixes(
    redis_connection: Redis, is_shared: bool, first_left: int
) -> None:
    """Groups of 50 rows: 100 are taken where another worker takes the rest, else a whole run."""
    batch = submit(redis_connection, ["slow:600"] * 300, starts=range(1, 300, 50))

    def act() -> None:
        wait_until(lambda: counts_of(redis_connection, batch)["running"] > 0)
        assert waiting_lines(redis_connection)[0] == first_left
        worker.request_stop(15, None)

    worker = make_worker(redis_connection, SLOW, slots=2, prefetch=1)
    with another_worker(redis_connection) if is_shared else nullcontext():
        work(worker, act)


def test_a_run_is_worked_off_in_order(redis_connection: Redis) -> None:
    """Backlog and all: every row once, in the order of the queue."""
    batch = submit(redis_connection, [f"p{n}" for n in range(300)])
    work(make_worker(redis_connection, slots=1, prefetch=1))
    assert_reconciled(redis_connection, batch)
    done = [int(raw) for raw in redis_connection.lrange(redis_keys.done(batch), 0, -1)]
    assert done == list(range(1, 301))


def test_rqs_command_cancels_the_backlog_at_once(
    redis_connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that looks at its leases every ten minutes still ends that row, and never starts
    it."""
    monkeypatch.setattr(session, "POLL_SECONDS", 600.0)
    batch = submit(redis_connection, ["slow:100000"] + ["quick"] * 3)

    def act() -> None:
        wait_until(lambda: counts_of(redis_connection, batch)["running"] == 4)
        send_stop_job_command(redis_connection, f"{batch}-3", serializer=JSONSerializer)
        wait_until(lambda: num_ended(redis_connection, batch) == 1)
        row = results_of(redis_connection, batch)[3]
        assert row.error == ("canceled", "stopped before it was started")

    unhurried = {"lease_seconds": 1800, "heartbeat_seconds": 600, "drain_seconds": 0}
    work(make_worker(redis_connection, SLOW, slots=1, prefetch=0, **unhurried), act)
    assert ended_as(redis_connection, batch) == {"ok": 0, "canceled": 1, "running": 0}


def test_a_stop_is_heeded_that_comes_while_its_row_is_pulled(
    redis_connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis counts the row as running before the worker knows of it."""
    monkeypatch.setattr(session, "POLL_SECONDS", 600.0)
    pull, may_end = RedisSide.pull, threading.Event()

    def slow_pull(*args: Any, **options: Any) -> Any:
        run = pull(*args, **options)
        assert not run.jobs or may_end.wait(60)
        return run

    monkeypatch.setattr(RedisSide, "pull", slow_pull)
    batch = submit(redis_connection, ["slow:100"] + ["quick"] * 3)

    def act() -> None:
        wait_until(lambda: counts_of(redis_connection, batch)["running"] == 4)
        send_stop_job_command(redis_connection, f"{batch}-3", serializer=JSONSerializer)
        wait_until(lambda: worker._session is not None and worker._session._unknown_cancels)
        may_end.set()
        wait_until(lambda: num_ended(redis_connection, batch) == 4)
        assert worker._session is not None and not worker._session._unknown_cancels

    worker = make_worker(redis_connection, SLOW, slots=1, prefetch=0)
    work(worker, act)
    assert ended_as(redis_connection, batch) == {"ok": 3, "canceled": 1, "running": 0}


def test_the_backlog_is_canceled_like_all_else(redis_connection: Redis) -> None:
    """By the client, within the poll: a row that waits never starts, a row that runs makes room."""
    batch = submit(redis_connection, ["slow:100000"] + ["quick"] * 3)

    def act() -> None:
        wait_until(lambda: counts_of(redis_connection, batch)["running"] == 4)
        moves = Transitions(redis_connection)
        moves.settle(QUEUE, "canceled", [(f"{batch}-2", b"x"), (f"{batch}-1", b"x")])
        wait_until(lambda: redis_connection.hexists(redis_keys.results(batch), "4"))

    work(make_worker(redis_connection, SLOW, slots=1, prefetch=0), act)
    assert ended_as(redis_connection, batch) == {"ok": 2, "canceled": 2, "running": 0}


def ended_as(connection: Redis, batch: str) -> dict[str, int]:
    """How many rows ended well, were canceled, and run."""
    counts = counts_of(connection, batch)
    return {name: counts[name] for name in ("ok", "canceled", "running")}


def test_time_runs_from_the_start(redis_connection: Redis) -> None:
    """A row that waited longer than its timeout has all of it when it starts."""
    batch = submit(redis_connection, ["slow:300"] * 6, timeout_seconds=3)
    work(make_worker(redis_connection, SLOW, slots=1, prefetch=0))
    assert_reconciled(redis_connection, batch)
    assert counts_of(redis_connection, batch)["ok"] == 6


def test_leases_of_the_backlog_are_renewed(redis_connection: Redis) -> None:
    """Rows that wait longer than a lease lasts are still ours."""
    batch = submit(redis_connection, ["slow:150"] * 12)
    moves = Transitions(redis_connection)

    def act() -> None:
        while num_ended(redis_connection, batch) < 12:
            assert moves.reap(QUEUE) == (0, 0)
            time.sleep(0.05)

    worker = make_worker(
        redis_connection, SLOW, slots=1, prefetch=0, lease_seconds=2, heartbeat_seconds=0.2
    )
    work(worker, act)
    assert_reconciled(redis_connection, batch)


def test_an_empty_queue_brings_backlogs_back(redis_connection: Redis) -> None:
    """Where there is another worker, an empty queue is filled with its half of what waits."""
    batch = submit(redis_connection, ["slow:100000"] * 20)

    def act() -> None:
        wait_until(lambda: counts_of(redis_connection, batch)["running"] == 20)
        with another_worker(redis_connection):
            wait_until(lambda: redis_connection.llen(QUEUE_KEY) >= 8)
            first, *_ = lines = waiting_lines(redis_connection)
            assert 10 <= first <= 13
            assert lines == list(range(first, 21))

    worker = make_worker(redis_connection, SLOW, slots=2, prefetch=0, drain_seconds=0)
    work(worker, act)


def test_a_burst_takes_back_what_nobody_took(redis_connection: Redis) -> None:
    """A worker that gave its backlog back does not end before that is done, by whomever."""
    with another_worker(redis_connection):
        batch = submit(redis_connection, ["slow:250"] * 5)
        work(make_worker(redis_connection, SLOW, slots=1, prefetch=0))
    assert_reconciled(redis_connection, batch)
    assert counts_of(redis_connection, batch)["ok"] == 5


def test_two_workers_share_the_end(
    redis_server: RedisServer, redis_connection: Redis, tmp_path: Path
) -> None:
    """The one that came first does not keep the rows that the other could do. No row ends here."""
    batch = submit(redis_connection, ["slow:100000"] * 24)
    plan: dict[str, object] = {"step_seconds": 0.01}
    settings: dict[str, object] = {"SLOTS": 2, "PREFETCH": 0}

    def start(name: str) -> WorkerProcess:
        log = tmp_path / name
        return WorkerProcess(redis_server.url, log, "--name", name, plan=plan, settings=settings)

    def num_held(name: str) -> int:
        keys = (f"rq:job:{batch}-{line}" for line in range(1, 25))
        return sum(redis_connection.hget(key, "worker_name") == name.encode() for key in keys)

    with workers(start("first")):
        wait_until(lambda: num_held("first") == 24)
        with workers(start("second")):
            wait_until(lambda: num_held("second") >= 4 and num_held("first") <= 16)
            assert num_held("first") >= 8


def test_max_jobs_is_exact_with_a_backlog(redis_connection: Redis) -> None:
    """No job more is taken than asked for, however long a run would be."""
    batch = submit(redis_connection, [f"p{n}" for n in range(100)])
    make_worker(redis_connection, slots=2, prefetch=1).work(max_jobs=45, logging_level="INFO")
    assert counts_of(redis_connection, batch)["ok"] == 45
    assert waiting_lines(redis_connection) == list(range(46, 101))


def deaths_of(connection: Redis, batch: str, total: int) -> list[int]:
    """Lines that are said to have cost a life, each as often as it did."""
    lines = range(1, total + 1)
    counts = [int(connection.hget(f"rq:job:{batch}-{n}", "bkv_deaths") or 0) for n in lines]
    return [line for line, count in zip(lines, counts, strict=True) for _ in range(count)]


def has_begun(connection: Redis, batch: str, line: int) -> bool:
    """Whether Redis knows that the line has been handed to an engine."""
    return connection.hget(f"rq:job:{batch}-{line}", "bkv_begun") == b"1"


def test_a_kill_counts_what_had_begun(
    redis_server: RedisServer, redis_connection: Redis, tmp_path: Path
) -> None:
    """Of the 38 rows that a killed worker held: the three that its engine had, two of which had
    come out of its backlog."""
    batch = submit(redis_connection, ["slow:1", "slow:100000", "slow:2"] + ["slow:100000"] * 37)
    worker = WorkerProcess(
        *(redis_server.url, tmp_path / "log", "--name", "victim"),
        plan={"step_seconds": 0.05},
        settings={"SLOTS": 2, "PREFETCH": 1},
    )
    with workers(worker):
        wait_until(lambda: num_ended(redis_connection, batch) == 2)
        wait_until(lambda: has_begun(redis_connection, batch, 5))
        assert counts_of(redis_connection, batch)["running"] == 38
    assert Transitions(redis_connection).reap(QUEUE, "victim") == (38, 0)
    assert deaths_of(redis_connection, batch, 40) == [2, 4, 5]
    assert waiting_lines(redis_connection) == [2, *range(4, 41)]


def test_what_begins_in_place_of_canceled_rows_is_told(redis_connection: Redis) -> None:
    """Also where there is no end to tell: within the next exchange with Redis."""
    batch = submit(redis_connection, ["slow:100000"] * 9)

    def act() -> None:
        wait_until(lambda: has_begun(redis_connection, batch, 3))
        assert not has_begun(redis_connection, batch, 4)
        moves = Transitions(redis_connection)
        moves.settle(QUEUE, "canceled", [(f"{batch}-1", b"x"), (f"{batch}-3", b"x")])
        wait_until(lambda: has_begun(redis_connection, batch, 5))
        assert has_begun(redis_connection, batch, 4) and not has_begun(redis_connection, batch, 6)

    work(make_worker(redis_connection, SLOW, slots=2, prefetch=1, drain_seconds=0), act)
    assert not any(has_begun(redis_connection, batch, line) for line in range(1, 10))


def test_what_begins_while_redis_is_away_is_told_then(tmp_path: Path) -> None:
    """The list of what has begun outlives the calls that fail."""
    with running_server("--appendonly", "yes", "--appendfsync", "always") as server:
        batch = submit(server.connect(), ["slow:40", "slow:40", *["slow:100000"] * 5])
        worker = WorkerProcess(
            *(server.url, tmp_path / "log"),
            plan={"step_seconds": 0.02},
            settings={"SLOTS": 2, "PREFETCH": 0},
        )
        with workers(worker):
            wait_until(lambda: counts_of(server.connect(), batch)["running"] == 7)
            server.stop()
            wait_until(lambda: "Redis is away" in worker.said)
            time.sleep(1)
            server.start()
            wait_until(lambda: has_begun(server.connect(), batch, 4))
            assert has_begun(server.connect(), batch, 3)
            assert num_ended(server.connect(), batch) == 2


def make_suspects(connection: Redis, count: int) -> None:
    """Let a worker die with the first rows of the queue."""
    moves = Transitions(connection)
    moves.give_back(QUEUE, [j.lease for j in moves.pull(QUEUE, "dead", count, 60)], died=True)


def test_suspects_run_together_and_apart(redis_connection: Redis) -> None:
    """Rows that saw a worker die run before the others, as one group; then all is as it was."""
    batch = submit(redis_connection, ["slow:100"] * 3 + ["slow:100000"] * 47)
    make_suspects(redis_connection, 3)
    seen = set()

    def act() -> None:
        while num_ended(redis_connection, batch) < 3:
            running = counts_of(redis_connection, batch)["running"]
            seen.add(running if num_ended(redis_connection, batch) < 3 else 0)
        wait_until(lambda: counts_of(redis_connection, batch)["running"] == 47)

    work(make_worker(redis_connection, SLOW, slots=3, prefetch=1, drain_seconds=0), act)
    assert max(seen) == 3
    assert set(redis_connection.lrange(redis_keys.done(batch), 0, -1)) == {b"1", b"2", b"3"}
    assert waiting_lines(redis_connection) == list(range(4, 51))


def test_a_busy_worker_passes_suspects_by(redis_connection: Redis) -> None:
    """It takes what stands behind them, as soon as there is room, and when there is nothing else it
    does not ask again and again."""
    first = submit(redis_connection, ["slow:100000"], name="first")
    num_calls = 0

    def calls() -> int:
        found = redis_connection.info("commandstats")
        return int(found["cmdstat_evalsha"]["calls"])

    def act() -> None:
        nonlocal num_calls
        wait_until(lambda: has_begun(redis_connection, first, 1))
        redis_connection.set("rq:suspended", 1)
        time.sleep(1.2)
        batch = submit(redis_connection, ["slow:100000"] * 20)
        for line in (1, 2, 4):
            redis_connection.hset(f"rq:job:{batch}-{line}", "bkv_deaths", 1)
        redis_connection.delete("rq:suspended")
        wait_until(lambda: counts_of(redis_connection, batch)["running"] == 17)
        assert waiting_lines(redis_connection) == [1, 2, 4]
        more = submit(redis_connection, ["slow:100000"] * 6, name="more")
        others = [(f"{batch}-{n}", b"x") for n in range(1, 21) if n not in (1, 2, 4, 20)]
        Transitions(redis_connection).settle(QUEUE, "canceled", others)
        wait_until(lambda: has_begun(redis_connection, batch, 20))  # there is room now
        wait_until(lambda: counts_of(redis_connection, more)["running"] == 6)
        before = calls()
        time.sleep(1.5)
        num_calls = calls() - before
        assert waiting_lines(redis_connection) == [1, 2, 4]

    settings = {"slots": 8, "prefetch": 1, "drain_seconds": 0, "maintenance_seconds": 600}
    work(make_worker(redis_connection, SLOW, **settings), act)
    assert num_calls < 10


def test_a_burst_does_not_end_before_the_suspects(redis_connection: Redis) -> None:
    """Passed by is not exhausted."""
    batch = submit(redis_connection, ["slow:20"] * 30)
    for line in (2, 3, 29, 30):
        redis_connection.hset(f"rq:job:{batch}-{line}", "bkv_deaths", 1)
    work(make_worker(redis_connection, SLOW, slots=4, prefetch=1))
    assert_reconciled(redis_connection, batch)
    done = [int(raw) for raw in redis_connection.lrange(redis_keys.done(batch), 0, -1)]
    assert done[-4:] == [2, 3, 29, 30]


def test_a_dead_engine_is_no_fault_of_the_backlog(redis_connection: Redis) -> None:
    """Only the rows that the engine had count a death."""
    batch = submit(redis_connection, ["crash", "a", "b", "c", "d"])
    worker = make_worker(redis_connection, SLOW, slots=1, prefetch=0)
    try:
        worker.work(burst=True, logging_level="INFO")
    except SystemExit as ending:
        assert ending.code == 70
    deaths = [redis_connection.hget(f"rq:job:{batch}-{n}", "bkv_deaths") for n in range(1, 6)]
    assert deaths == [b"1", None, None, None, None]
    assert waiting_lines(redis_connection) == [1, 2, 3, 4, 5]


def test_a_pull_ends_when_it_has_enough_bytes(redis_connection: Redis) -> None:
    """Long prompts make short runs; the length of the queue comes with them."""
    data = bytes(7 * 2**20)
    batch = submit(redis_connection, ["p"] * 10, data=lambda _: data)
    run = Transitions(redis_connection).pull_run(QUEUE, "w", 10, 60)
    assert [job.lease.job_id for job in run.jobs] == [f"{batch}-{n}" for n in (1, 2, 3)]
    assert run.num_queued == 7


def test_rows_that_wait_in_the_engine_go_back_at_the_end(redis_connection: Redis) -> None:
    """When the queue is empty, another worker gets its half of what waits in the engine."""
    batch = submit(redis_connection, ["slow:100000"] * 30)

    def act() -> None:
        wait_until(lambda: counts_of(redis_connection, batch)["running"] == 30)
        with another_worker(redis_connection):
            wait_until(lambda: counts_of(redis_connection, batch)["running"] <= 18)
            first, *_ = lines = waiting_lines(redis_connection)
            assert 14 <= first <= 19
            assert lines == list(range(first, 31))

    work(make_worker(redis_connection, SLOW, slots=2, prefetch=28, drain_seconds=0), act)


def test_rows_that_wait_in_the_engine_make_way(redis_connection: Redis) -> None:
    """Of rows that a worker's engine has, only those in slots go on when more urgent ones come."""
    batch = submit(redis_connection, ["slow:100000"] * 12)

    def act() -> None:
        wait_until(lambda: counts_of(redis_connection, batch)["running"] == 12)
        urgent = submit(redis_connection, ["slow:100000"] * 5, name="urgent", priority="high")
        wait_until(lambda: all(has_begun(redis_connection, urgent, n) for n in range(1, 6)))
        assert has_begun(redis_connection, batch, 1)
        assert not has_begun(redis_connection, batch, 12)

    work(make_worker(redis_connection, SLOW, slots=2, prefetch=10, drain_seconds=0), act)
    assert counts_of(redis_connection, batch)["running"] == 0
