"""Hosts between a real server and processes with fake engines."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from redis import Redis

from batchkv_producer import Client
from batchkv_producer.manage import drain
from batchkv_producer.monitor.hosts import HostMoves, wish_for
from batchkv_producer.monitor.workers import (
    WorkerInfo,
    hosts_of,
    listed_workers,
    read_workers,
    refusing_hosts,
    served_models,
)
from batchkv_producer.wire import redis_keys
from batchkv_worker.queue.models.setbacks import Setbacks
from batchkv_worker.queue.models.view import Watcher
from support.worker_harness import (
    QUICK_LEASES,
    WorkerProcess,
    assert_reconciled,
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


def served_by(connection: Redis, model: str) -> int:
    """How many workers serve a model now."""
    name = redis_keys.queue_name(model)
    found = [one for one in listed_workers(connection) if not one.is_host]
    return sum(name in one.queues and bool(one.num_slots) for one in found)


def test_a_host_that_is_killed_while_it_changes_leaves_no_claim(
    redis_connection: Redis, redis_url: str, tmp_path: Path
) -> None:
    """The host that is started after it loads the model, ends all rows of both, and ends."""
    one = start(redis_url, tmp_path, "one", "b", load_seconds=30)
    batch = queue(redis_connection, tmp_path, "b", 3)
    with running(one):
        wait_until(lambda: "loading b" in one.said)
        os.kill(one.process.pid, signal.SIGKILL)
        more = queue(redis_connection, tmp_path, "a", 3)
        two = start(redis_url, tmp_path, "one", "a", "b", "--burst")  # the name is free at once
        with running(two):
            assert two.wait() == 0
    for name, model in ((more, "a"), (batch, "b")):
        assert_reconciled(redis_connection, name, queue=redis_keys.queue_name(model))
    assert read_workers(redis_connection) == []


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
        wait_until(lambda: [one.doing for one in listed_workers(redis_connection)][1] == "drained")
        seen = host_of(redis_connection).last_heartbeat
        wait_until(lambda: host_of(redis_connection).last_heartbeat > seen + 0.3)
        assert host_of(redis_connection).doing == "drained"
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


def test_a_host_says_which_model_it_could_not_load(
    redis_connection: Redis, redis_url: str, tmp_path: Path
) -> None:
    """Whoever waits for that model is told so, and the rows of the other one are computed."""
    host = start(redis_url, tmp_path, "host", "a", "b", broken="b:never")
    batch = queue(redis_connection, tmp_path, "a", 2)
    queue(redis_connection, tmp_path, "b", 1)
    with running(host):
        wait_until(lambda: served_by(redis_connection, "a") == 1)
        wait_until(lambda: "failed to load b" in host_of(redis_connection).doing)
        wait_until(lambda: is_done(redis_connection, batch))
        found = host_of(redis_connection)
        assert found.refused == ("b",)
        assert (hosts_of([found], "a"), hosts_of([found], "b")) == (["host"], [])
        assert refusing_hosts([found], "b") == ["host"]
        assert "b" not in served_models(redis_connection)
        host.process.terminate()
        assert host.wait() == 0


def test_a_model_that_could_be_loaded_later_is_refused_no_more(
    redis_connection: Redis, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has to send it a row first: it is ready for a call of a gateway."""
    monkeypatch.setenv("FAKE_REFUSED_SECONDS", "1")
    mended = tmp_path / "mended"
    host = start(redis_url, tmp_path, "host", "a", "b", broken=f"b:{mended}")
    batch = queue(redis_connection, tmp_path, "b", 1)
    with running(host):
        wait_until(lambda: "b is refused" in host.said)
        wait_until(lambda: host_of(redis_connection).refused == ("b",))
        Client(redis_connection).cancel(batch)
        mended.write_text("", "utf-8")
        wish_for(redis_connection, "b")
        wait_until(lambda: served_by(redis_connection, "b") == 1)
        wait_until(lambda: host_of(redis_connection).refused == ())
        wait_until(lambda: "holds b" in host_of(redis_connection).doing)
        assert "failed" not in host_of(redis_connection).doing


def test_a_claim_needs_what_was_last_seen(redis_connection: Redis) -> None:
    """Of two hosts that look and then claim, one is refused until it has looked again."""
    moves, fields = (
        HostMoves(redis_connection),
        {"birth": "now", "queues": "batchkv:a", "bkv_models": '["a"]'},
    )
    before = [moves.beat(name, fields, 60).version for name in ("one", "two")]
    assert before[0] == before[1]
    assert moves.claim("one", before[0], {**fields, "bkv_held": '{"a": "one-a"}'}, 60).is_written
    assert not moves.claim(
        "two", before[1], {**fields, "bkv_held": '{"a": "two-a"}'}, 60
    ).is_written
    assert Watcher(redis_connection, "two", ["a"]).look(set()).queues["a"].num_holders == 1
    assert moves.claim("two", moves.beat("two", fields, 60).version, fields, 60).is_written


def test_a_worker_that_takes_none_of_the_rows_counts_as_idle() -> None:
    """Rows for others make a queue barren, longer each time; a row that is taken ends that."""
    setbacks = Setbacks()
    setbacks.note_idle("a", 0.5, 100.0)
    assert not setbacks.is_barren("a", 100.0)
    setbacks.note_idle("a", 60.0, 100.0)
    assert setbacks.is_barren("a", 109.0) and not setbacks.is_barren("a", 110.0)
    setbacks.note_idle("a", 60.0, 110.0)
    assert setbacks.is_barren("a", 129.0) and not setbacks.is_barren("a", 130.0)
    setbacks.note_idle("a", 60.0, 130.0)
    setbacks.note_work("a")
    assert not setbacks.is_barren("a", 131.0)


def test_models_that_die_are_left_alone_longer_each_time() -> None:
    """A changed model is loaded again at once; a refused one rests for ten minutes."""
    setbacks = Setbacks()
    assert [setbacks.note_end("a", 70, 0.0) for _ in range(8)][-3:] == [32.0, 60.0, 60.0]
    assert setbacks.note_end("b", 72, 0.0) == 1.0
    assert setbacks.note_end("c", 2, 0.0) == 600.0
    assert setbacks.is_refused("c") and not setbacks.is_refused("a")
    setbacks.note_ready("c")
    assert not setbacks.is_refused("c") and not setbacks.failure("c")
    assert setbacks.is_aside("a", 59.0) and not setbacks.is_aside("a", 60.0)
