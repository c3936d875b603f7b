"""A batch over restarts, a worker's death, a clock that jumps and a folder that is moved."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from openai import OpenAI
from openai.types import Batch
from redis import Redis

from batchkv_gateway import redis_keys
from batchkv_gateway.scripts import lease
from support.gateway import Gateway, chat_file, running_gateway, working
from support.redis_server import RedisServer, running_server
from support.worker_harness import (
    MODEL,
    QUICK_LEASES,
    WorkerProcess,
    counts_of,
    wait_until,
    workers,
)

URL = "/v1/chat/completions"
WRITE = "batchkv_gateway.batches.outputs:Outputs.write"
SOON = {"LEASE_SECONDS": 0.5, "LOOK_SECONDS": 0.2, "REST_SECONDS": 0.2}
DAY = 86_400.0


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """A server of this module that keeps its data over a restart."""
    with running_server("--appendonly", "yes", "--appendfsync", "always") as found:
        yield found


@pytest.fixture
def redis(server: RedisServer) -> Iterator[Redis]:
    """A connection to the server, which is emptied first."""
    with server.connect() as found:
        found.flushall()
        yield found


def create(client: OpenAI, *custom_ids: str, text: str = "") -> Batch:
    content = chat_file(*custom_ids)
    if text:
        content = content.replace(b"text of", text.encode())
    file = client.files.create(file=("in", content), purpose="batch")
    return client.batches.create(
        completion_window="24h", endpoint=URL, input_file_id=file.id, metadata={"n": text}
    )


def held_batch(gateway: Gateway, server: RedisServer, *custom_ids: str) -> str:
    """A batch whose rows have ended, and whose files are about to be written."""
    with working(server.url), gateway.client() as client:
        made = create(client, *custom_ids)
        wait_until(gateway.held.exists)
    return made.id


def answers(client: OpenAI, text: str) -> bool:
    """Whether a worker answers live rows by now."""
    try:
        client.completions.create(model=MODEL, prompt=text)
    except (openai.NotFoundError, openai.InternalServerError):
        return False
    return True


def queued_id(redis: Redis, batch_id: str) -> str:
    """The id in the queue of a batch, once it is there."""
    wait_until(lambda: redis.hget(redis_keys.batch(batch_id), "queued_id"))
    found = redis.hget(redis_keys.batch(batch_id), "queued_id")
    assert isinstance(found, bytes)
    return found.decode()


def completed(gateway: Gateway, batch_id: str) -> list[str]:
    """Wait for a batch. The custom_ids of its output, in which it has all of its rows."""
    deadline = time.monotonic() + 30
    with gateway.client() as client:
        while (batch := client.batches.retrieve(batch_id)).status != "completed":
            assert batch.status in ("validating", "in_progress", "finalizing"), batch
            assert time.monotonic() < deadline, (batch, gateway.log.read_text())
            time.sleep(0.05)
        assert batch.error_file_id is None
        text = client.files.content(str(batch.output_file_id)).text
    return [json.loads(line)["custom_id"] for line in text.splitlines()]


def test_files_are_written_once_over_restarts(
    server: RedisServer, redis: Redis, tmp_path: Path
) -> None:
    """While a batch's files are written, the server restarts; later the gateway gets SIGTERM,
    and its home folder is moved. Each file is there once, and nothing else."""
    home, moved = tmp_path / "home", tmp_path / "moved"
    with running_gateway(server.url, home, hold_at=WRITE, **SOON) as gateway:
        first = held_batch(gateway, server, "a", "b")
        server.stop()
        server.start()
        gateway.held.unlink()
        assert completed(gateway, first) == ["a", "b"]
    with running_gateway(server.url, home, hold_at=WRITE, **SOON) as gateway:
        second = held_batch(gateway, server, "c", "d")
        gateway.process.terminate()
        gateway.held.unlink()
        assert gateway.process.wait(20) == 0, gateway.log.read_text()
    home.rename(moved)
    with running_gateway(server.url, moved, **SOON) as gateway:
        assert completed(gateway, second) == ["c", "d"]
        assert completed(gateway, first) == ["a", "b"]
    assert len(list((moved / "gateway").iterdir())) == 4  # two inputs, two outputs
    assert redis.zcard(redis_keys.PENDING) == 0 and redis.zcard(redis_keys.OPEN) == 0


def test_a_restart_and_a_dead_worker_lose_no_row(
    server: RedisServer, redis: Redis, tmp_path: Path
) -> None:
    """The server restarts in the middle of a stream, which goes on where it was. Then the worker
    of a batch is killed, and another one ends the batch: each row has its answer once."""
    settings = {"SLOTS": 4, **QUICK_LEASES}
    plan: dict[str, object] = {"step_seconds": 0.01}

    def worker(name: str) -> WorkerProcess:
        return WorkerProcess(server.url, tmp_path / name, plan=plan, settings=settings)

    with (
        running_gateway(server.url, tmp_path / "home", **SOON) as gateway,
        gateway.client() as client,
        workers(worker("first")) as (first,),
    ):
        wait_until(lambda: answers(client, "hi"), 60)
        pieces = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "slow:99 " + "x" * 99}], stream=True
        )
        found = [next(pieces).choices[0].delta.content or "" for _ in range(3)]
        server.stop()
        server.start()
        found += [chunk.choices[0].delta.content or "" for chunk in pieces if chunk.choices]
        assert "".join(found) == "echo slow:99 " + "x" * 99
        names = [f"r{number}" for number in range(6)]
        made = create(client, *names, text="slow:60")
        queued = queued_id(redis, made.id)
        wait_until(lambda: counts_of(redis, queued)["running"] >= 4)
        first.process.kill()
        with workers(worker("second")):
            assert completed(gateway, made.id) == names
        batch = client.batches.retrieve(made.id)
        assert batch.request_counts and batch.request_counts.completed == len(names)


def test_a_clock_that_was_wrong_delays_nothing(redis: Redis) -> None:
    """A lease that ends later than any lease can was made by another clock: it is void."""
    key, batch_id = redis_keys.LEASES, "batch_1"
    assert lease(redis, key, batch_id, "one:1", 3000)
    assert not lease(redis, key, batch_id, "two:2", 3000)
    later = int((time.time() + DAY) * 1000)
    redis.hset(key, batch_id, f"one:1 {later}")
    assert lease(redis, key, batch_id, "two:2", 3000)
    assert not lease(redis, key, batch_id, "one:1", 3000)


def test_a_clock_that_jumps_ends_no_batch(
    server: RedisServer, redis: Redis, tmp_path: Path
) -> None:
    """The gateway's clock goes forty days ahead, and then behind. Every batch is computed, and no
    file that an open batch reads is deleted."""
    with (
        running_gateway(server.url, tmp_path / "home", SWEEP_SECONDS=0.2, **SOON) as gateway,
        gateway.client() as client,
    ):
        made = [create(client, "a", text="1"), create(client, "a", text="2")]
        wait_until(lambda: client.batches.retrieve(made[1].id).status == "in_progress")
        gateway.clock.write_text(str(40 * DAY))
        made.append(create(client, "a", text="3"))
        with working(server.url):
            assert completed(gateway, made[0].id) == ["a"]
            gateway.clock.write_text(str(-DAY / 2))
            made.append(create(client, "a", text="4"))
            for each in made:
                assert completed(gateway, each.id) == ["a"]


def test_a_server_that_hangs_does_not_keep_the_gateway(
    server: RedisServer, redis: Redis, tmp_path: Path
) -> None:
    """After SIGTERM it waits some time for its steps, then it ends without them, and says so."""
    with running_gateway(server.url, tmp_path / "home", END_SECONDS=0.3, **SOON) as gateway:
        with gateway.client() as client:
            made = create(client, "a")
            wait_until(lambda: client.batches.retrieve(made.id).status == "in_progress")
        os.kill(server.pid, signal.SIGSTOP)
        try:
            time.sleep(0.5)  # in which a step begins, and hangs
            gateway.process.terminate()
            assert gateway.process.wait(20) == 0
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert "stopped in the middle of a step" in gateway.log.read_text()
