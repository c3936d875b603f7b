"""Real worker processes that are killed, stopped, hung, cut off: every row ends exactly once.

All of it at random and at once is in ``tests/chaos``.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from redis import Redis

from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.suspects import deaths_until_failed
from batchkv_worker.queue.maintenance import Maintenance
from support.redis_server import running_server
from support.worker_harness import (
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

Start = Callable[..., WorkerProcess]


@pytest.fixture
def start(redis_url: str, tmp_path: Path) -> Start:
    """Start a worker of the stock ``rq`` command; its settings beside the quick leases."""

    def make(*flags: str, log: str = "log", **options: object) -> WorkerProcess:
        settings = QUICK_LEASES | dict(options.pop("settings", {}))  # type: ignore[call-overload]
        return WorkerProcess(redis_url, tmp_path / log, *flags, settings=settings, **options)  # type: ignore[arg-type]

    return make


def is_running(connection: Redis, batch: str, num: int = 1) -> Callable[[], bool]:
    return lambda: counts_of(connection, batch)["running"] >= num


# -- kills ----------------------------------------------------------------------------------------


def test_kill_9_with_two_workers(redis_connection: Redis, start: Start) -> None:
    """One of two workers is killed with its hands full: the other does its rows too, once each."""
    batch = submit(redis_connection, ["slow:5"] * 300)
    plan: dict[str, object] = {"step_seconds": 0.01}
    with workers(start(plan=plan), start(plan=plan, log="other")) as (victim, other):
        wait_until(lambda: num_ended(redis_connection, batch) > 50)
        victim.process.kill()
        wait_until(lambda: num_ended(redis_connection, batch) == 300)
        other.process.send_signal(signal.SIGTERM)
        assert other.wait() == 0
    assert_reconciled(redis_connection, batch)
    assert counts_of(redis_connection, batch)["ok"] == 300


def test_a_sleeper_drops_what_was_taken_over(redis_connection: Redis, start: Start) -> None:
    """A Mac whose lid was closed past its leases wakes up and does not answer a second time."""
    batch = submit(redis_connection, ["slow:20"] * 100)
    plan: dict[str, object] = {"step_seconds": 0.02}
    with workers(start(plan=plan)) as (sleeper,):
        wait_until(is_running(redis_connection, batch, 40))
        sleeper.process.send_signal(signal.SIGSTOP)
        with workers(start(plan=plan, log="other")) as (other,):
            wait_until(lambda: num_ended(redis_connection, batch) == 100)
            sleeper.process.send_signal(signal.SIGCONT)
            wait_until(lambda: "dropped" in sleeper.said)
            other.process.send_signal(signal.SIGTERM)
            sleeper.process.send_signal(signal.SIGTERM)
            assert (other.wait(), sleeper.wait()) == (0, 0)
    assert_reconciled(redis_connection, batch)


def test_a_redis_outage_loses_nothing(tmp_path: Path) -> None:
    """The server goes and comes back in mid-batch: what ended meanwhile waits in the worker."""
    with running_server("--appendonly", "yes", "--appendfsync", "always") as server:
        connection = server.connect()
        batch = submit(connection, ["slow:30"] * 120)
        worker = WorkerProcess(
            *(server.url, tmp_path / "log", "--burst"),
            plan={"step_seconds": 0.02},
            settings={"LEASE_SECONDS": 20, "HEARTBEAT_SECONDS": 1},
        )
        with workers(worker):
            wait_until(is_running(connection, batch, 40))
            server.stop()
            time.sleep(2.5)
            server.start()
            assert worker.wait() == 0
        assert "Redis is away" in worker.said
        assert "Redis is back" in worker.said
        connection = server.connect()
        assert_reconciled(connection, batch)
        deaths = [connection.hget(f"rq:job:{batch}-{line}", "bkv_deaths") for line in range(1, 121)]
        assert deaths == [None] * 120


def test_a_long_outage_hands_the_rows_to_others(tmp_path: Path) -> None:
    """When leases lapse during an outage, late results are dropped, not written twice."""
    with running_server("--appendonly", "yes", "--appendfsync", "always") as server:
        connection = server.connect()
        batch = submit(connection, ["slow:25"] * 40)
        worker = WorkerProcess(
            *(server.url, tmp_path / "log", "--burst"),
            plan={"step_seconds": 0.02},
            settings=QUICK_LEASES,
        )
        with workers(worker):
            wait_until(is_running(connection, batch, 40))
            server.stop()
            time.sleep(3)
            server.start()
            assert worker.wait() == 0
        assert_reconciled(server.connect(), batch)


# -- the engine -----------------------------------------------------------------------------------


def test_a_dead_engine_is_exit_code_70(redis_connection: Redis, start: Start) -> None:
    """One clear line, the jobs back in the queue with a death counted, what had ended stored."""
    batch = submit(redis_connection, ["slow:1", "slow:50", "crash"])
    with workers(start(settings={"SLOTS": 1})) as (worker,):
        assert worker.wait() == 70
    assert worker.said.count("the engine died (RuntimeError: crashed as asked)") == 1
    assert num_ended(redis_connection, batch) == 2
    assert redis_connection.lrange(redis_keys.queue(QUEUE), 0, -1) == [f"{batch}-3".encode()]
    assert redis_connection.hget(f"rq:job:{batch}-3", "bkv_deaths") == b"1"


def test_a_device_that_failed_is_exit_code_74(redis_connection: Redis, start: Start) -> None:
    """The rows go back in their order without a death, and another worker runs them as before."""
    batch = submit(redis_connection, ["slow:1", "slow:3", "device fault", "p"])
    with workers(start(settings={"SLOTS": 4})) as (worker,):
        assert worker.wait() == 74
    assert "no death of theirs is counted" in worker.said
    assert "AGX_RELAX_CDM_CTXSTORE_TIMEOUT=1" in worker.said
    waiting = redis_connection.lrange(redis_keys.queue(QUEUE), 0, -1)
    assert waiting == sorted(waiting) and f"{batch}-3".encode() in waiting
    for line in range(1, 5):
        died = redis_connection.hmget(f"rq:job:{batch}-{line}", "bkv_deaths", "bkv_suspect")
        assert died == [None, None]


def test_a_poisonous_row_does_not_take_its_neighbours_along(
    redis_connection: Redis, start: Start
) -> None:
    """After a death what had begun is halved: only the row that kills the engine is failed."""
    batch = submit(redis_connection, ["p"] * 3 + ["crash"] + ["slow:3"] * 10)
    codes = []
    while not codes or codes[-1] == 70:
        with workers(start("--burst", plan={"steps": 5})) as (worker,):
            codes.append(worker.wait())
    assert codes == [70] * deaths_until_failed(4) + [0]
    # Whoever died last may have cleaned in this interval: then the row's turn comes in the next.
    redis_connection.delete(redis_keys.maintenance_lock(QUEUE))
    assert Maintenance(redis_connection, QUEUE, "test").run(1.0)
    assert_reconciled(redis_connection, batch)
    assert counts_of(redis_connection, batch)["ok"] == 13
    assert results_of(redis_connection, batch)[4].outcome == "failed"
    deaths = [redis_connection.hget(f"rq:job:{batch}-{line}", "bkv_died") for line in (1, 2, 3)]
    assert deaths == [b"2", b"2", b"3"]


@pytest.mark.parametrize("how", ["hang", "hang in C"])
def test_a_hung_engine_is_exit_code_71(redis_connection: Redis, start: Start, how: str) -> None:
    """The watchdog tells what was going on, gives the jobs back and ends the process."""
    batch = submit(redis_connection, ["slow:2", f"{how}: my secret words", "p"])
    with workers(start(settings={"SLOTS": 1, "ENGINE_TIMEOUT": 1})) as (worker,):
        assert worker.wait() == 71
    assert "no step for" in worker.said
    assert "in step" in worker.said and worker.said.count("Thread 0x") >= 2
    assert "rows wait, 1 rows decode" in worker.said or "rows wait, 0 rows decode" in worker.said
    assert f"go back: {batch}-2" in worker.said
    assert "secret" not in worker.said
    assert counts_of(redis_connection, batch) == {
        **{"total": 3, "ok": 1, "failed": 0, "canceled": 0, "running": 0}
    }
    assert redis_connection.llen(redis_keys.queue(QUEUE)) == 2


def test_a_hang_that_keeps_the_interpreter_is_told(redis_connection: Redis, start: Start) -> None:
    """Nobody else can run then: stacks are written all the same, and the leases lapse."""
    batch = submit(redis_connection, ["hang with the interpreter"])
    settings = {"ENGINE_TIMEOUT": 2, "LEASE_SECONDS": 2, "HEARTBEAT_SECONDS": 1}
    with workers(start(settings=settings)) as (worker,):
        wait_until(lambda: "Timeout" in worker.said and "in step" in worker.said)
        with workers(start(log="other", settings=settings)) as (other,):
            halves = f"rq:job:{batch}-1"
            wait_until(lambda: redis_connection.hget(halves, "bkv_halves") == b"1")
            other.process.kill()
        worker.process.kill()


def test_a_model_that_cannot_be_loaded(redis_connection: Redis, start: Start) -> None:
    """Exit code 2 and the loader's sentence; no job was touched."""
    batch = submit(redis_connection, ["p"])
    with workers(start(plan={"load_error": "no weights in /models/x"})) as (worker,):
        assert worker.wait() == 2
    assert "batchkv: no weights in /models/x\n" in worker.said
    assert "Traceback" not in worker.said
    assert not redis_connection.hexists(f"rq:job:{batch}-1", "started_at")


# -- stopping -------------------------------------------------------------------------------------


def test_a_warm_stop_finishes_what_decodes(redis_connection: Redis, start: Start) -> None:
    """The first SIGTERM: rows in slots end within the drain limit, nothing new is taken."""
    batch = submit(redis_connection, ["slow:30"] * 100)
    with workers(start(plan={"step_seconds": 0.02})) as (worker,):
        wait_until(is_running(redis_connection, batch, 40))
        worker.process.send_signal(signal.SIGTERM)
        assert worker.wait() == 0
    counts = counts_of(redis_connection, batch)
    assert counts["ok"] >= 40
    assert counts["running"] == 0
    assert redis_connection.llen(redis_keys.queue(QUEUE)) == 100 - counts["ok"]


def test_the_drain_limit_gives_the_rest_back(redis_connection: Redis, start: Start) -> None:
    """Rows that take longer than the drain limit go back, in their order, at the head."""
    batch = submit(redis_connection, ["slow:1000000"] * 60)
    plan: dict[str, object] = {"step_seconds": 0.01}
    with workers(start(plan=plan, settings={"DRAIN_SECONDS": 0.5})) as (worker,):
        wait_until(is_running(redis_connection, batch, 40))
        worker.process.send_signal(signal.SIGINT)
        assert worker.wait() == 0
    ids = [f"{batch}-{line}".encode() for line in range(1, 61)]
    assert redis_connection.lrange(redis_keys.queue(QUEUE), 0, -1) == ids
    assert redis_connection.hget(f"rq:job:{batch}-1", "bkv_deaths") is None


def test_a_second_signal_is_a_cold_stop(redis_connection: Redis, start: Start) -> None:
    """It gives everything back at once, however long the drain limit."""
    batch = submit(redis_connection, ["slow:1000000"] * 10)
    plan: dict[str, object] = {"step_seconds": 0.01}
    with workers(start(plan=plan, settings={"DRAIN_SECONDS": 600})) as (worker,):
        wait_until(is_running(redis_connection, batch, 10))
        worker.process.send_signal(signal.SIGTERM)
        time.sleep(1.1)
        begun = time.monotonic()
        worker.process.send_signal(signal.SIGTERM)
        assert worker.wait() == 0
        assert time.monotonic() - begun < 20
    assert redis_connection.llen(redis_keys.queue(QUEUE)) == 10


def own_command() -> tuple[str, ...]:
    """``batchkv worker`` on the fake engine."""
    return (sys.executable, "-m", "support.fake_engine")


def test_a_worker_ends_with_its_parent(redis_connection: Redis, start: Start) -> None:
    """End of file on standard input: everything goes back at once, and the process is gone."""
    batch = submit(redis_connection, ["slow:1000000"] * 10)
    started = start(
        "--exit-with-parent",
        plan={"step_seconds": 0.01},
        command=own_command(),
        stdin=subprocess.PIPE,
    )
    with workers(started) as (worker,):
        wait_until(is_running(redis_connection, batch, 10))
        assert worker.process.stdin is not None
        begun = time.monotonic()
        worker.process.stdin.close()
        assert worker.wait() == 0
        assert time.monotonic() - begun < 20
    assert redis_connection.llen(redis_keys.queue(QUEUE)) == 10
