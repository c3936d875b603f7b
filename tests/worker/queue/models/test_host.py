"""Hosts between a real server and processes with fake engines."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from redis import Redis

from batchkv_producer import Client
from batchkv_producer.manage import drain
from batchkv_producer.monitor.workers import (
    WorkerInfo,
    hosts_of,
    listed_workers,
    read_workers,
    served_models,
)
from batchkv_producer.wire import redis_keys
from support.worker_harness import (
    QUICK_LEASES,
    WorkerProcess,
    assert_reconciled,
    num_ended,
    wait_until,
    workers,
)

COMMAND = (sys.executable, "-m", "worker.queue.models.fake_host")


def start(url: str, folder: Path, name: str, *words: str, **plan: object) -> WorkerProcess:
    """A host with fake engines; ``words``: its groups and flags."""
    return WorkerProcess(
        *(url, folder / f"{name}.log", *words, "--name", name),
        command=COMMAND,
        plan=plan,
        settings=QUICK_LEASES,
    )


def queue(connection: Redis, folder: Path, model: str, count: int) -> str:
    """Queue so many rows of a model; the batch's id."""
    path = folder / f"{model}-{count}.jsonl"
    path.write_text("".join(f'{{"prompt": "{model} {i}"}}\n' for i in range(count)), "utf-8")
    return Client(connection).submit(path, model=model).batch_id


def loads_of(*hosts: WorkerProcess) -> int:
    """How many models these hosts have begun to load."""
    return sum(host.said.count("started with PID") for host in hosts)


def is_done(connection: Redis, *batches: str) -> bool:
    return all(Client(connection).status(batch).is_done for batch in batches)


@contextmanager
def running(*hosts: WorkerProcess) -> Iterator[None]:
    with workers(*hosts):
        yield


def test_one_host_ends_a_model_before_it_changes(
    redis_connection: Redis, redis_url: str, tmp_path: Path
) -> None:
    """Two models that do not fit together: two loads, and the first ends all its rows before."""
    first, second = (queue(redis_connection, tmp_path, model, 60) for model in ("a", "b"))
    host = start(redis_url, tmp_path, "host", "a", "b", "--burst", step_seconds=0.002)
    with running(host):
        wait_until(lambda: num_ended(redis_connection, first) == 60)
        assert host.wait() == 0
    for batch, model in ((first, "a"), (second, "b")):
        assert_reconciled(redis_connection, batch, queue=redis_keys.queue_name(model))
    assert loads_of(host) == 2
    assert host.said.index("changing to b") > host.said.index("host-a-")
    assert read_workers(redis_connection) == []


def test_three_hosts_share_two_models(
    redis_connection: Redis, redis_url: str, tmp_path: Path
) -> None:
    """A large host holds both, two small ones change: every row once, at most five loads."""
    batches = {model: queue(redis_connection, tmp_path, model, 150) for model in ("a", "b")}
    plan = {"step_seconds": 0.01, "load_seconds": 0.2}
    large = start(redis_url, tmp_path, "large", "a,b", **plan)
    small = [start(redis_url, tmp_path, name, "a", "b", **plan) for name in ("one", "two")]
    with running(large, *small):
        wait_until(lambda: is_done(redis_connection, *batches.values()))
    for model, batch in batches.items():
        assert_reconciled(redis_connection, batch, queue=redis_keys.queue_name(model))
    assert loads_of(large, *small) <= 5


def test_two_idle_hosts_do_not_both_change_for_one_row(
    redis_connection: Redis, redis_url: str, tmp_path: Path
) -> None:
    """Whoever claims the model first loads it; the other sees the claim and stays."""
    hosts = [start(redis_url, tmp_path, name, "a", "b") for name in ("one", "two")]
    for number in (1, 2):  # both hold a
        queue(redis_connection, tmp_path, "a", number)
    with running(*hosts):
        wait_until(lambda: served_by(redis_connection, "a") == 2)
        batch = queue(redis_connection, tmp_path, "b", 1)
        wait_until(lambda: is_done(redis_connection, batch))
        wait_until(lambda: served_by(redis_connection, "b") == 1)
        assert loads_of(*hosts) == 3


def served_by(connection: Redis, model: str) -> int:
    """How many workers serve a model now."""
    name = redis_keys.queue_name(model)
    found = [one for one in listed_workers(connection) if not one.is_host]
    return sum(name in one.queues and bool(one.num_slots) for one in found)


def test_a_host_that_is_killed_while_it_changes_leaves_no_claim(
    redis_connection: Redis, redis_url: str, tmp_path: Path
) -> None:
    """Its claim ends with its heartbeats: another host then loads the model."""
    one = start(redis_url, tmp_path, "one", "b", load_seconds=30)
    batch = queue(redis_connection, tmp_path, "b", 3)
    with running(one):
        wait_until(lambda: "loading b" in one.said)
        os.kill(one.process.pid, signal.SIGKILL)
        two = start(redis_url, tmp_path, "two", "a", "b", "--burst")
        with running(two):
            wait_until(lambda: is_done(redis_connection, batch))
            assert two.wait() == 0
    assert_reconciled(redis_connection, batch, queue=redis_keys.queue_name("b"))


def host_of(connection: Redis) -> WorkerInfo:
    (found,) = (one for one in listed_workers(connection) if one.is_host)
    return found


def test_a_host_says_what_it_may_serve_and_holds(
    redis_connection: Redis, redis_url: str, tmp_path: Path
) -> None:
    """``batchkv workers`` lists it beside its workers, and draining it drains them."""
    host = start(redis_url, tmp_path, "host", "a", "b")
    with running(host):
        wait_until(lambda: served_by(redis_connection, "a") == 1)
        wait_until(lambda: "holds a" in host_of(redis_connection).doing)
        found = host_of(redis_connection)
        assert hosts_of([found], "b") == ["host"]
        assert found.queues == ()
        assert found.models == ("a", "b")
        assert [model for model, _ in found.held] == ["a"]
        assert served_models(redis_connection)[-1] == "b"
        drain.drain(redis_connection, "host")
        wait_until(lambda: all(one.is_drained for one in listed_workers(redis_connection)))
        batch = queue(redis_connection, tmp_path, "b", 2)
        drain.resume(redis_connection, "host")
        wait_until(lambda: is_done(redis_connection, batch))
        host.process.terminate()
        assert host.wait() == 0
    assert listed_workers(redis_connection) == []


def test_a_model_that_is_refused_or_dies_leaves_the_others_alone(
    redis_connection: Redis, redis_url: str, tmp_path: Path
) -> None:
    """A host whose models are all refused ends with 2; nothing is tried for ever."""
    host = start(redis_url, tmp_path, "host", "a", "b", load_error="it is broken")
    for model in ("a", "b"):
        queue(redis_connection, tmp_path, model, 1)
    with running(host):
        assert host.wait() == 2
    assert "a is refused" in host.said
    assert "b is refused" in host.said


def test_a_queue_with_rows_for_others_counts_as_empty(
    redis_connection: Redis, redis_url: str, tmp_path: Path
) -> None:
    """Rows that need other weights do not keep a host from the model that waits."""
    others = queue(redis_connection, tmp_path, "a", 3)
    redis_connection.hset(redis_keys.batch(others), "fingerprint", "f" * 32)
    host = start(redis_url, tmp_path, "host", "a", "b")
    with running(host):
        wait_until(lambda: served_by(redis_connection, "a") == 1)
        batch = queue(redis_connection, tmp_path, "b", 2)
        wait_until(lambda: is_done(redis_connection, batch), 30.0)
    assert num_ended(redis_connection, others) == 0
