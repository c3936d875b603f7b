"""What a death or a closed lid costs: the survivor works at full width, the suspects together."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from redis import Redis

from batchkv_producer.monitor.workers import read_workers
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.transitions import Transitions
from support.worker_harness import (
    QUEUE,
    WorkerProcess,
    assert_reconciled,
    counts_of,
    num_ended,
    results_of,
    submit,
    wait_until,
    workers,
)

SLOTS = 8
Start = Callable[..., WorkerProcess]


@pytest.fixture
def start(redis_url: str, tmp_path: Path) -> Start:
    """Start a worker of that name on this machine; all have one home folder."""

    def make(name: str, **settings: object) -> WorkerProcess:
        settings = {"SLOTS": SLOTS, "PREFETCH": 2, **settings}
        plan: dict[str, object] = {"step_seconds": 0.005}
        log = tmp_path / name
        return WorkerProcess(redis_url, log, "--name", name, plan=plan, settings=settings)

    return make


def held_by(connection: Redis, batch: str) -> dict[str, Counter[str]]:
    """Worker -> how many rows it has begun, how many of these are suspects, how many are not."""
    found: dict[str, Counter[str]] = {}
    leases = connection.zrange(redis_keys.registry("wip", QUEUE), 0, -1)
    with connection.pipeline() as pipeline:
        for lease in leases:
            key = b"rq:job:" + lease.rpartition(b":")[0]
            pipeline.hmget(key, "worker_name", "bkv_begun", "bkv_suspect")
        for name, begun, suspect in pipeline.execute():
            if begun:
                kind = "suspects" if suspect else "others"
                found.setdefault((name or b"").decode(), Counter())[kind] += 1
    return found


def suspects(connection: Redis, batch: str, total: int) -> set[int]:
    return {
        line
        for line in range(1, total + 1)
        if connection.hexists(f"rq:job:{batch}-{line}", "bkv_suspect")
    }


def test_after_a_kill_the_survivor_works_at_full_width(
    redis_connection: Redis, start: Start
) -> None:
    """kill -9 of one of two workers: the next worker of its machine tells of the death and runs the
    rows that it had begun, all at once and apart; the other takes the rest with all its slots."""
    total = 180
    prompts = [f"slow:{40 + 7 * line % 60}" for line in range(total)]
    batch = submit(redis_connection, prompts)
    seen: list[dict[str, Counter[str]]] = []
    with workers(start("victim"), start("survivor")) as (victim, survivor):
        wait_until(lambda: num_ended(redis_connection, batch) > 20)
        wait_until(lambda: held_by(redis_connection, batch).get("victim", Counter())["others"] >= 8)
        victim.process.kill()
        with workers(start("next")) as (newcomer,):
            wait_until(lambda: suspects(redis_connection, batch, total))
            group = suspects(redis_connection, batch, total)
            while redis_connection.exists(redis_keys.queue(QUEUE)):
                seen.append(held_by(redis_connection, batch))
            wait_until(lambda: num_ended(redis_connection, batch) == total)
            for worker in (survivor, newcomer):
                worker.process.send_signal(signal.SIGTERM)
            assert (survivor.wait(), newcomer.wait()) == (0, 0)
    assert_reconciled(redis_connection, batch)
    assert counts_of(redis_connection, batch)["ok"] == total
    assert SLOTS <= len(group) <= SLOTS + 2
    assert {results_of(redis_connection, batch)[line].worker for line in group} == {"next"}
    apart = [held["next"] for held in seen if held.get("next", Counter())["suspects"]]
    assert max(held["suspects"] for held in apart) == len(group)
    assert all(not held["others"] for held in apart)
    widths = sorted(held["survivor"]["others"] for held in seen if "survivor" in held)
    assert widths[len(widths) // 2] >= SLOTS - 1


def test_a_death_is_seen_between_rounds_of_maintenance(
    redis_connection: Redis, start: Start
) -> None:
    """kill -9 of a worker whose lease would last for an hour: one that was there already, and whose
    next round of maintenance is an hour away, takes its rows back."""
    rare, total = {"LEASE_SECONDS": 3600, "MAINTENANCE_SECONDS": 3600}, 120
    with workers(start("survivor", **rare), start("victim", **rare)) as (survivor, victim):
        wait_until(lambda: len(read_workers(redis_connection)) == 2)
        batch = submit(redis_connection, ["slow:40"] * total)
        wait_until(lambda: held_by(redis_connection, batch).get("victim"))
        victim.process.kill()
        victim.process.wait()
        wait_until(lambda: num_ended(redis_connection, batch) == total)
        survivor.process.send_signal(signal.SIGTERM)
        assert survivor.wait() == 0
    assert_reconciled(redis_connection, batch)
    assert counts_of(redis_connection, batch)["ok"] == total


def test_a_closed_lid_makes_no_suspects(redis_connection: Redis, start: Start) -> None:
    """The leases of a worker that is stopped lapse, which may be nobody's fault: the other takes
    its rows at once, beside all others."""
    batch = submit(redis_connection, ["slow:60"] * 60)
    quick = {"LEASE_SECONDS": 1, "HEARTBEAT_SECONDS": 0.3, "MAINTENANCE_SECONDS": 0.3}
    with workers(start("sleeper", **quick)) as (sleeper,):
        wait_until(lambda: held_by(redis_connection, batch).get("sleeper"))
        sleeper.process.send_signal(signal.SIGSTOP)
        held = {int(i) for i in redis_connection.hkeys(f"batchkv:held:{batch}")}
        with workers(start("other", **quick)) as (other,):
            wait_until(lambda: num_ended(redis_connection, batch) == 60)
            assert suspects(redis_connection, batch, 60) == set()
            halves = {
                line
                for line in range(1, 61)
                if redis_connection.hget(f"rq:job:{batch}-{line}", "bkv_halves") == b"1"
            }
            assert 0 < len(halves) <= SLOTS + 2 and halves <= held
            for worker in (sleeper, other):
                worker.process.send_signal(signal.SIGCONT)
                worker.process.send_signal(signal.SIGTERM)
            assert (sleeper.wait(), other.wait()) == (0, 0)
    assert_reconciled(redis_connection, batch)


def test_one_worker_alone_takes_the_suspects_in_the_end(
    redis_connection: Redis, start: Start
) -> None:
    """It works on at full width, and takes the group when it holds nothing."""
    batch = submit(redis_connection, ["slow:30"] * 40)
    moves = Transitions(redis_connection)
    dead = [job.lease for job in moves.pull(QUEUE, "dead", 4, 60)]
    with workers(start("only")) as (only,):
        wait_until(lambda: num_ended(redis_connection, batch) > 0)
        moves.give_back(QUEUE, dead, died=True)
        wait_until(lambda: num_ended(redis_connection, batch) == 40)
        only.process.send_signal(signal.SIGTERM)
        assert only.wait() == 0
    assert_reconciled(redis_connection, batch)
    done = [int(line) for line in redis_connection.lrange(redis_keys.done(batch), 0, -1)]
    assert set(done[-4:]) == {1, 2, 3, 4}


def test_a_worker_may_have_the_name_of_one_that_died_on_its_machine(
    redis_connection: Redis, start: Start
) -> None:
    """Whoever starts a killed worker again with its --name need not wait until the server has
    forgotten it; while one of that name is running, another is refused."""
    batch = submit(redis_connection, ["slow:1000000"] * 4)
    with workers(start("mac")) as (first,):
        wait_until(lambda: held_by(redis_connection, batch))
        with workers(start("mac")) as (second,):
            assert second.wait() == 2
        assert "--name mac: a worker of that name is running" in second.said
        assert held_by(redis_connection, batch) == {"mac": Counter(others=4)}
        first.process.kill()
        first.process.wait()
        with workers(start("mac")):
            wait_until(lambda: held_by(redis_connection, batch) == {"mac": Counter(suspects=4)})


def test_a_worker_that_lives_tells_of_its_neighbours_death(
    redis_connection: Redis, start: Start
) -> None:
    """It looks around with its maintenance, long before a lease lapses."""
    batch = submit(redis_connection, ["slow:400"] * 30)
    with workers(start("alive", MAINTENANCE_SECONDS=0.3), start("victim")) as (_, victim):
        wait_until(lambda: len(held_by(redis_connection, batch)) == 2)
        begun = time.monotonic()
        victim.process.kill()
        wait_until(lambda: suspects(redis_connection, batch, 30))
        assert time.monotonic() - begun < 30  # a lease is 60 s
