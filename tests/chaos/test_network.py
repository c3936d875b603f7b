"""Bad networks between workers and Redis, and between the producer's commands and Redis."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from redis import Redis

from batchkv_producer import Client, retry
from batchkv_producer.errors import ServerError
from batchkv_producer.server import connection as producer_connection
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.job import Result, encode_result
from batchkv_producer.wire.transitions import JobResult, Transitions
from chaos import audit
from support.fault_proxy import FaultProxy, Link
from support.redis_server import RedisServer
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

IS_LONG = os.environ.get("BATCHKV_CHAOS", "") == "long"
SEED = int(os.environ.get("CHAOS_SEED", "1"))


@pytest.fixture
def proxy(redis_server: RedisServer, redis_connection: Redis) -> Iterator[FaultProxy]:
    """A line to the session's server, which is empty."""
    with FaultProxy(redis_server.socket) as made:
        yield made


def deaths_of(connection: Redis, batch: str, total: int) -> list[int]:
    """Lines that are said to have cost somebody's life."""
    lines = range(1, total + 1)
    return [n for n in lines if connection.hget(f"rq:job:{batch}-{n}", "bkv_deaths") is not None]


def test_rows_of_the_backlog_start_while_redis_hangs(
    redis_connection: Redis, proxy: FaultProxy, tmp_path: Path
) -> None:
    """A server that accepts and never answers: the engine gets row after row of what the worker
    holds; nothing of it waits for Redis, and nothing is lost of what ended meanwhile."""
    tally = tmp_path / "tally"
    batch = submit(redis_connection, ["slow:10"] * 130)
    worker = WorkerProcess(
        *(proxy.url, tmp_path / "log", "--burst"),
        plan={"step_seconds": 0.01, "tally": str(tally)},
        settings={"SLOTS": 4, "PREFETCH": 2},
    )
    with workers(worker):
        wait_until(lambda: num_ended(redis_connection, batch) >= 10)
        proxy.hang()
        before = int(tally.read_text() or 0)
        # Six rows are in the engine, a hundred and more in the backlog.
        wait_until(lambda: int(tally.read_text() or 0) >= before + 50, 9)
        stored = num_ended(redis_connection, batch)
        assert stored < before + 50
        proxy.heal()
        assert worker.wait() == 0
    assert "Redis is away" not in worker.said or "Redis is back" in worker.said
    assert_reconciled(redis_connection, batch)
    assert counts_of(redis_connection, batch)["ok"] == 130
    assert deaths_of(redis_connection, batch, 130) == []


# -- workers behind bad lines ---------------------------------------------------------------------


def test_a_worker_behind_a_bad_line_loses_and_repeats_nothing(
    redis_server: RedisServer, redis_connection: Redis, tmp_path: Path
) -> None:
    """Two workers, each behind a line that delays, jitters, resets, goes half open, hangs, trickles
    and breaks in the middle of answers: every row has one result, the right one."""
    rng = random.Random(SEED)
    count, num_faults = (4000, 150) if IS_LONG else (150, 6)
    prompts = [f"slow:{rng.randint(1, 20)} row {line} {'x' * 300}" for line in range(count)]
    batch = submit(redis_connection, prompts)
    settings = {**QUICK_LEASES, "LEASE_SECONDS": 5, "SLOTS": 4, "PREFETCH": 2}
    with ExitStack() as stack:
        lines = [stack.enter_context(FaultProxy(redis_server.socket, SEED + n)) for n in range(2)]
        crew = [
            WorkerProcess(
                line.url, tmp_path / f"log{n}", plan={"step_seconds": 0.01}, settings=settings
            )
            for n, line in enumerate(lines)
        ]
        stack.enter_context(workers(*crew))
        # One that is reset while it registers itself ends: whoever started it may do so again.
        wait_until(lambda: all("the engine is ready" in worker.said for worker in crew))
        wait_until(lambda: num_ended(redis_connection, batch) > 0)
        for _ in range(num_faults):
            disturb(rng.choice(lines), rng)
        for line in lines:
            line.heal()
        wait_until(lambda: num_ended(redis_connection, batch) == count, 60 + count / 20)
        wait_until(lambda: not redis_connection.exists(redis_keys.queue(QUEUE)))
        for worker in crew:
            worker.process.send_signal(signal.SIGTERM)
        assert [worker.wait(30) for worker in crew] == [0, 0]
        assert not IS_LONG or sum(line.num_cuts for line in lines) >= num_faults // 6
    assert_reconciled(redis_connection, batch)
    assert audit.leftovers(redis_connection, QUEUE) == []
    for line, row in results_of(redis_connection, batch).items():
        assert (row.outcome, row.text) == ("ok", f"echo {prompts[line - 1]}")


def disturb(line: FaultProxy, rng: random.Random) -> None:
    """One of the faults, for a moment; then a moment of quiet."""
    fault = rng.choice(("slow", "trickle", "reset", "cut", "hang", "deaf"))
    if fault == "slow":
        line.link = Link(delay_seconds=rng.uniform(0.005, 0.05), jitter_seconds=0.05)
    elif fault == "trickle":
        line.link = Link(bytes_per_second=1e6)
    elif fault == "reset":
        line.reset()
    elif fault == "cut":
        line.cut_replies(rng.randrange(3000))
    else:
        line.link = Link(is_hung=fault == "hang", is_deaf=fault == "deaf")
    time.sleep(rng.uniform(0.1, 0.8))
    line.heal()
    time.sleep(rng.uniform(0.0, 0.4))


# -- the producer's commands ----------------------------------------------------------------------


@pytest.fixture
def quick_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that waits a second for an answer, not a minute."""
    monkeypatch.setattr(producer_connection, "REPLY_SECONDS", 1.0)
    monkeypatch.setattr(retry, "MAX_OUTAGE_SECONDS", 4.0)


def rows_in(folder: Path, count: int) -> Path:
    path = folder / "in.jsonl"
    rows = [{"custom_id": f"c{n}", "prompt": f"p{n} {'y' * 200}"} for n in range(1, count + 1)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_submit_over_a_bad_line_queues_each_row_once(
    redis_connection: Redis, proxy: FaultProxy, tmp_path: Path
) -> None:
    """Slow, narrow, cut in the middle of answers: the submit ends, or is given again, and every row
    stands in the queue once."""
    source = rows_in(tmp_path, 2500)
    proxy.link = Link(delay_seconds=0.005, jitter_seconds=0.01, bytes_per_second=1e6)
    with producer_connection.connect(proxy.url) as line:
        submitted = Client(line).submit(
            source, model=MODEL, on_progress=lambda done, _: proxy.cut_replies(done % 3)
        )
    assert proxy.num_cuts >= 3
    queued = redis_connection.lrange(redis_keys.queue(QUEUE), 0, -1)
    wanted = {f"{submitted.batch_id}-{n}".encode() for n in range(1, 2501)}
    assert (len(queued), set(queued)) == (2500, wanted)


@pytest.mark.usefixtures("quick_replies")
def test_commands_name_a_server_that_hangs(
    redis_connection: Redis, proxy: FaultProxy, tmp_path: Path
) -> None:
    """submit, status, wait and results on a line that went dead: a named error after one try, not
    after seven; on a good line the same calls go on and are right."""
    source = rows_in(tmp_path, 3000)
    with producer_connection.connect(proxy.url) as line:
        client = Client(line)
        with is_named(proxy):
            client.submit(source, model=MODEL, on_progress=lambda *_: proxy.hang())
        proxy.heal()
        submitted = client.submit(source, model=MODEL)
        queued = redis_connection.lrange(redis_keys.queue(QUEUE), 0, -1)
        assert len(queued) == len(set(queued)) == 3000
        batch = submitted.batch_id
        end_all(redis_connection)
        calls: list[Callable[[], object]] = [
            lambda: client.status(batch),
            lambda: client.wait(batch),
            lambda: list(client.results(batch)),
            lambda: client.result(f"{batch}-1"),
        ]
        for call in calls:
            proxy.hang()
            tries = proxy.num_connections
            with is_named(proxy):
                call()
            assert proxy.num_connections - tries <= 2
            proxy.heal()
        assert client.wait(batch).ok == 3000
        found = {row.line: row.result.text for row in client.results(batch)}
        assert found == {n: f"answer {n}" for n in range(1, 3001)}


@contextmanager
def is_named(proxy: FaultProxy) -> Iterator[None]:
    """Inside, the command ends with an error that names what is wrong."""
    is_raised = pytest.raises(ServerError, match="does not answer")
    with is_raised, producer_connection.server_errors(proxy.url):
        yield


def end_all(connection: Redis) -> None:
    """Answer whatever is queued."""
    moves = Transitions(connection)
    while pulled := moves.pull(QUEUE, "w", 500, 60):
        endings = []
        for one in pulled:
            line = int(one.lease.job_id.split("-")[1])
            row = Result(f"c{line}", "completion", "ok", text=f"answer {line}")
            endings.append(JobResult(one.lease, "ok", encode_result(row)))
        moves.finish(QUEUE, "w", endings)
