"""``batchkv ask`` by the live lane: printed as it is made, and nothing left on the server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.live import LiveMoves
from support.worker_harness import MODEL, QUEUE, WorkerProcess, wait_until, workers

ASK = [sys.executable, "-m", "batchkv_producer", "ask", "-m", MODEL]


@pytest.fixture
def served(redis_url: str, tmp_path: Path) -> Iterator[Redis]:
    """A server with a worker on the fake engine, whose step takes 20 ms."""
    worker = WorkerProcess(redis_url, tmp_path / "log", plan={"step_seconds": 0.02})
    with workers(worker), Redis.from_url(redis_url) as redis:
        wait_until(lambda: redis.hget(f"rq:worker:{_name(redis)}", "bkv_live") == b"1")
        wait_until(lambda: not redis.hget(f"rq:worker:{_name(redis)}", "bkv_state"))
        yield redis


def _name(redis: Redis) -> str:
    found = redis.smembers(redis_keys.workers(QUEUE))
    return next(iter(found)).decode().removeprefix("rq:worker:") if found else ""


def asking(url: str, home: Path, *arguments: str) -> subprocess.Popen[bytes]:
    environment = {key: value for key, value in os.environ.items() if "BATCHKV" not in key}
    environment |= {"BATCHKV_REDIS_URL": url, "BATCHKV_HOME": str(home)}
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*ASK, *arguments], env=environment, **options)


def left_behind(redis: Redis) -> list[bytes]:
    """Keys of batches and jobs, and of live rows."""
    patterns = ("batchkv:batch*", "rq:job:*", "batchkv:live:row:*", redis_keys.live(QUEUE))
    return [key for pattern in patterns for key in redis.scan_iter(pattern)]


def test_the_answer_is_printed_as_it_is_made(served: Redis, redis_url: str, tmp_path: Path) -> None:
    """The first characters are there while the row decodes. The whole is what it would have been
    otherwise, also with --json."""
    with asking(redis_url, tmp_path / "home", "slow:40 why?") as process:
        assert process.stdout and process.stderr
        first = os.read(process.stdout.fileno(), 3)
        assert first and list(served.scan_iter("batchkv:live:row:*"))
        rest, said = process.communicate(timeout=30)
    assert (process.returncode, first + rest) == (0, b"echo slow:40 why?\n"), said
    assert b"a worker is started" not in said
    assert left_behind(served) == []
    with asking(redis_url, tmp_path / "home", "--json", "why?") as process:
        printed, said = process.communicate(timeout=30)
    body = json.loads(printed)["response"]["body"]
    assert body["choices"][0]["text"] == "echo why?"


def test_ctrl_c_cancels_the_row(served: Redis, redis_url: str, tmp_path: Path) -> None:
    """Exit code 130; the row is gone from the server, and no worker has it."""
    with asking(redis_url, tmp_path / "home", "slow:9999999 x") as process:
        assert process.stdout and os.read(process.stdout.fileno(), 1)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 130, said
    assert b"the question is deleted from the server" in said
    assert left_behind(served) == []


def test_a_failed_row_says_why(served: Redis, redis_url: str, tmp_path: Path) -> None:
    """Exit code 1, and nothing on standard output."""
    with asking(redis_url, tmp_path / "home", "reject:context_length_exceeded") as process:
        printed, said = process.communicate(timeout=30)
    assert (process.returncode, printed) == (1, b"")
    assert b"no answer: context_length_exceeded: rejected as asked" in said
    assert LiveMoves(served).cancel(["none"]) == 0
