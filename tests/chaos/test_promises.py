"""What is promised of recovery, each promise by itself: leases, sweeps, deaths, outages, sleep."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path

import pytest
from redis import Redis

from batchkv_producer.client import Client
from batchkv_producer.local.follow import Follower, stale_rows
from batchkv_producer.results import outfile
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.job import Result, encode_result
from batchkv_producer.wire.transitions import JobResult, Transitions
from batchkv_worker.queue.session import OTHERS_SECONDS
from batchkv_worker.settings import WorkerSettings
from support.fault_proxy import FaultProxy
from support.redis_server import RedisServer, running_server
from support.worker_harness import (
    MODEL,
    QUEUE,
    QUICK_LEASES,
    WorkerProcess,
    assert_reconciled,
    counts_of,
    num_ended,
    results_of,
    submit,
    wait_until,
    workers,
)

AOF = ("--appendonly", "yes", "--appendfsync", "always")


def deaths_of(connection: Redis, batch: str) -> dict[int, int]:
    """Line -> deaths, of those that are said to have cost somebody's life."""
    lines = range(1, counts_of(connection, batch)["total"] + 1)
    found = {line: connection.hget(f"rq:job:{batch}-{line}", "bkv_deaths") for line in lines}
    return {line: int(deaths) for line, deaths in found.items() if deaths is not None}


# -- leases and sweeps ----------------------------------------------------------------------------


def test_defaults_bring_jobs_back_within_two_minutes() -> None:
    """A dead worker's lease has to end, and the next sweep to come; after an outage sweeps wait for
    the others, which comes on top."""
    settings = WorkerSettings(model=MODEL)
    sweep = settings.maintenance_seconds  # at most: the lock expires within an interval
    assert settings.lease_seconds + sweep + OTHERS_SECONDS + 5 <= 120
    assert settings.heartbeat_seconds * 3 <= settings.lease_seconds  # two may be late


def test_every_job_in_hand_has_a_lease_that_is_renewed(
    redis_connection: Redis, redis_url: str, tmp_path: Path
) -> None:
    """What decodes and what waits behind it: all of it holds a lease, of the length that was set,
    and no lease comes near its end."""
    batch = submit(redis_connection, ["slow:600"] * 60)
    worker = WorkerProcess(
        *(redis_url, tmp_path / "log", "--burst"),
        plan={"step_seconds": 0.01},
        settings={**QUICK_LEASES, "LEASE_SECONDS": 3, "SLOTS": 8, "PREFETCH": 2},
    )
    wip = redis_keys.registry("wip", QUEUE)
    with workers(worker):
        wait_until(lambda: counts_of(redis_connection, batch)["running"] == 60)
        first = dict(redis_connection.zrange(wip, 0, -1, withscores=True))
        assert len(first) == 60
        seconds, micros = redis_connection.time()
        assert max(first.values()) <= seconds + micros / 1e6 + 3
        wait_until(lambda: min(dict(redis_connection.zrange(wip, 0, -1, withscores=True)).values())
                   > max(first.values()))  # fmt: skip
        assert set(redis_connection.zrange(wip, 0, -1)) == set(first)
    assert deaths_of(redis_connection, batch) == {}


def test_a_dead_workers_jobs_are_at_the_head_again(
    redis_connection: Redis, redis_url: str, tmp_path: Path
) -> None:
    """With shortened settings: whoever sweeps next puts them before all that waits, in order."""
    batch = submit(redis_connection, ["slow:1000000"] * 30)
    settings: dict[str, object] = {**QUICK_LEASES, "SLOTS": 4, "PREFETCH": 2}
    victim = WorkerProcess(
        *(redis_url, tmp_path / "log", "--max-jobs", "10"),
        plan={"step_seconds": 0.01},
        settings=settings,
    )
    with workers(victim):
        wait_until(lambda: counts_of(redis_connection, batch)["running"] == 10)
        victim.end()
        moves = Transitions(redis_connection)
        wait_until(lambda: moves.reap(QUEUE) == (10, 0))
    ids = [f"{batch}-{line}".encode() for line in range(1, 31)]
    assert redis_connection.lrange(redis_keys.queue(QUEUE), 0, -1) == ids


def test_no_moment_lies_between_pop_and_register(redis_connection: Redis) -> None:
    """A pull is one script: the id leaves the queue in the step that gives it its lease, and RQ's
    list in between is never used."""
    batch = submit(redis_connection, ["a"] * 3)
    watcher = redis_connection.monitor()
    with watcher as monitor:
        (pulled,) = Transitions(redis_connection).pull(QUEUE, "w", 1, 60)
        seen = [monitor.next_command() for _ in range(1)]
        while not any("ZADD" in line["command"] for line in seen):
            seen.append(monitor.next_command())
    commands = [(line["client_type"], line["command"].split()[0].upper()) for line in seen]
    moved = [kind for kind, command in commands if command in ("LPOP", "HSET", "ZADD")]
    assert set(moved) == {"lua"}
    assert not any("intermediate" in line["command"] for line in seen)
    assert pulled.lease.job_id == f"{batch}-1"


# -- deaths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "is_again", "deaths"),
    [("refused", False, 0), ("stopped", True, 0), ("engine died", True, 1),
     ("lapsed", True, 0.5), ("killed", True, 1), ("answer lost", True, 0)],
)  # fmt: skip
def test_a_row_is_tried_again_by_reason(
    redis_connection: Redis, reason: str, is_again: bool, deaths: float
) -> None:
    """What the engine refuses is not tried again; what was given back costs nothing; what may have
    killed its holder counts as a death, and as half of one when nobody knows that it died."""
    batch = submit(redis_connection, ["p"])
    moves = Transitions(redis_connection)
    worker = redis_keys.worker("w")
    redis_connection.hset(worker, "last_heartbeat", "2000-01-01T00:00:00.000000Z")
    (pulled,) = moves.pull(QUEUE, "w", 1, 60)
    wip = redis_keys.registry("wip", QUEUE)
    if reason == "refused":
        row = encode_result(Result("c1", "completion", "failed", error=("invalid_request", "no")))
        moves.finish(QUEUE, "w", [JobResult(pulled.lease, "failed", row)])
    elif reason in ("stopped", "engine died"):
        moves.give_back(QUEUE, [pulled.lease], died=reason == "engine died")
    elif reason == "killed":
        moves.reap(QUEUE, "w")
    else:
        if reason == "answer lost":  # the worker lives, and renews all that it knows of
            redis_connection.hset(worker, "last_heartbeat", "3000-01-01T00:00:00.000000Z")
        redis_connection.zadd(wip, {redis_connection.zrange(wip, 0, 0)[0]: 1})
        moves.reap(QUEUE)
    again = moves.pull(QUEUE, "w", 1, 60)
    halves = int(redis_connection.hget(f"rq:job:{batch}-1", "bkv_halves") or 0)
    assert [one.num_deaths + halves / 2 for one in again] == ([deaths] if is_again else [])
    assert num_ended(redis_connection, batch) == (0 if is_again else 1)


def test_a_poison_prompt_fails_alone(
    redis_connection: Redis, redis_url: str, tmp_path: Path
) -> None:
    """A row that kills the whole process: once it has cost a life it runs alone, no neighbour dies
    with it a second time, all are answered, and it is failed with its own reason."""
    prompts = [f"slow:2 {line}" for line in range(40)]
    prompts[17] = "die"
    batch = submit(redis_connection, prompts)
    number = 0
    settings: dict[str, object] = {**QUICK_LEASES, "LEASE_SECONDS": 1, "SLOTS": 8}
    while num_ended(redis_connection, batch) < 40:
        number += 1
        worker = WorkerProcess(
            *(redis_url, tmp_path / f"log{number}"),
            plan={"step_seconds": 0.01},
            settings=settings,
        )
        with workers(worker):
            wait_until(
                lambda worker=worker: (
                    worker.process.poll() is not None or num_ended(redis_connection, batch) == 40
                ),
                30,
            )
        assert number < 10
    assert_reconciled(redis_connection, batch)
    results = results_of(redis_connection, batch)
    assert [line for line, row in results.items() if row.outcome != "ok"] == [18]
    assert results[18].custom_id == "c18" and results[18].error is not None
    assert results[18].error[0] == "engine_error"
    others = {line: deaths for line, deaths in deaths_of(redis_connection, batch).items()}
    del others[18]
    assert max(others.values(), default=0) <= 1


def test_a_lost_answer_is_not_a_death(
    redis_server: RedisServer, redis_connection: Redis, tmp_path: Path
) -> None:
    """The line breaks in the middle of the answer to a pull: what the server gave away without
    anybody knowing comes back long before its leases end, and nobody is said to have died of it."""
    with FaultProxy(redis_server.socket) as proxy:
        worker = WorkerProcess(
            *(proxy.url, tmp_path / "log"),
            plan={"step_seconds": 0.02},
            settings={"SLOTS": 4, "PREFETCH": 0},
        )
        with workers(worker):
            wait_until(lambda: "the engine is ready" in worker.said)
            proxy.cut_replies(3000)  # the first long answer is that of the pull
            batch = submit(redis_connection, ["slow:3 " + "x" * 2000] * 60)
            wait_until(lambda: num_ended(redis_connection, batch) == 60)
        assert proxy.num_cuts >= 1
    assert_reconciled(redis_connection, batch)
    assert deaths_of(redis_connection, batch) == {}


# -- outages and sleep ----------------------------------------------------------------------------


def test_after_an_outage_nobody_takes_from_who_is_late(tmp_path: Path) -> None:
    """The server was away for longer than the leases. The first worker that finds it again does not
    sweep at once: one that comes a moment later renews its leases and keeps its rows."""
    with running_server(*AOF) as server:
        connection = server.connect()
        batch = submit(connection, ["slow:90"] * 16)
        settings: dict[str, object] = {**QUICK_LEASES, "SLOTS": 8, "PREFETCH": 0}
        settings |= {"LEASE_SECONDS": 1, "HEARTBEAT_SECONDS": 0.4}
        plan: dict[str, object] = {"step_seconds": 0.05}

        def start(name: str) -> WorkerProcess:
            log = tmp_path / name
            return WorkerProcess(server.url, log, "--max-jobs=8", plan=plan, settings=settings)

        late = start("late")
        with workers(late):
            wait_until(lambda: counts_of(connection, batch)["running"] == 8)
            early = start("early")
            with workers(early):
                wait_until(lambda: counts_of(connection, batch)["running"] == 16)
                server.stop()
                time.sleep(1.3)  # longer than the leases
                wait_until(lambda: "Redis is away" in early.said and "Redis is away" in late.said)
                late.process.send_signal(signal.SIGSTOP)
                server.start()
                wait_until(lambda: "Redis is back" in early.said)
                time.sleep(1.5)  # several of its sweeps, if it made any
                late.process.send_signal(signal.SIGCONT)
                connection = server.connect()
                wait_until(lambda: num_ended(connection, batch) == 16)
                assert "took back" not in early.said and "dropped" not in late.said
        assert_reconciled(connection, batch)
        assert deaths_of(connection, batch) == {}


def end_some(connection: Redis, batch: str, count: int) -> None:
    """Pull jobs and finish them."""
    moves = Transitions(connection)
    endings = []
    for pulled in moves.pull(QUEUE, "w", count, 60):
        line = int(pulled.lease.job_id.split("-")[1])
        row = Result(f"c{line}", "completion", "ok", text=f"answer {line}")
        endings.append(JobResult(pulled.lease, "ok", encode_result(row)))
    assert moves.finish(QUEUE, "w", endings) == ["ok"] * len(endings)


@pytest.mark.parametrize("is_file", [True, False])
def test_a_server_that_lost_its_last_second_costs_no_line(tmp_path: Path, is_file: bool) -> None:
    """Results were read, the server went back to before them, and other rows took their places in
    the finish order: whoever follows still gets every row, once."""
    with running_server(*AOF) as server:
        batch = submit(server.connect(), ["p"] * 12)
        end_some(server.connect(), batch, 4)
        shutil.copytree(server.directory / "appendonlydir", tmp_path / "before")
        end_some(server.connect(), batch, 4)
        client = Client(server.connect())
        rows = client.results(batch, follow=True)
        lines = [] if is_file else [next(rows).line for _ in range(8)]
        with outfile.open_results(tmp_path / "out.jsonl", batch) as target:
            follower = Follower(client, batch, target)
            assert follower.collect() == 8
            server.kill()
            shutil.rmtree(server.directory / "appendonlydir")
            shutil.copytree(tmp_path / "before", server.directory / "appendonlydir")
            server.start()
            connection = server.connect()
            assert num_ended(connection, batch) == 4
            moves = Transitions(connection)
            moves.give_back(QUEUE, [p.lease for p in moves.pull(QUEUE, "w", 4, 60)][::-1])
            connection.lmove(redis_keys.queue(QUEUE), redis_keys.queue(QUEUE), "RIGHT", "LEFT")
            connection.lmove(redis_keys.queue(QUEUE), redis_keys.queue(QUEUE), "RIGHT", "LEFT")
            end_some(connection, batch, 8)
            if is_file:
                follower.collect()
                follower.refresh(stale_rows(Client(connection), batch))
                assert target.num_rows == 12
            else:
                lines += [row.line for row in rows]
                assert sorted(lines) == list(range(1, 13))
