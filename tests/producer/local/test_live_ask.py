"""``batchkv ask`` by the live lane: printed as it is made, and nothing left on the server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.live import LiveMoves
from support import fake_worker
from support.worker_harness import MODEL, QUEUE, WorkerProcess, wait_until, workers

ASK = [sys.executable, "-m", "batchkv_producer", "ask", "-m", MODEL]
WITH_FAKE_WORKER = [
    *(sys.executable, str(Path(fake_worker.__file__).with_name("batchkv_with_fake_worker.py"))),
    *("ask", "-m", MODEL),
]


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


def asking(
    url: str, home: Path, *arguments: str, command: Sequence[str] = ASK
) -> subprocess.Popen[bytes]:
    environment = {key: value for key, value in os.environ.items() if "BATCHKV" not in key}
    environment |= {"BATCHKV_REDIS_URL": url, "BATCHKV_HOME": str(home)}
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*command, *arguments], env=environment, **options)


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


@pytest.mark.parametrize("is_near", [True, False])
def test_a_question_outlives_the_worker_that_would_answer(
    redis_url: str, tmp_path: Path, is_near: bool
) -> None:
    """Killed on this machine, it serves nobody at once; on another, when its name is gone."""
    worker = WorkerProcess(redis_url, tmp_path / "log")  # its home is in tmp_path
    with workers(worker), Redis.from_url(redis_url) as redis:
        wait_until(lambda: redis.hget(f"rq:worker:{_name(redis)}", "bkv_live") == b"1")
        wait_until(lambda: not redis.hget(f"rq:worker:{_name(redis)}", "bkv_state"))
        worker.process.kill()
        worker.process.wait()
        home = tmp_path / ("home" if is_near else "another")
        with asking(redis_url, home, "why?", command=WITH_FAKE_WORKER) as process:
            if not is_near:
                wait_until(lambda: bool(redis.exists(redis_keys.live(QUEUE))))
                redis.delete(f"rq:worker:{_name(redis)}")
            assert process.stderr
            said = b""
            too_long = threading.Timer(40, process.kill)
            too_long.start()
            while b": a worker is started for this question" not in said:
                said += process.stderr.readline()
                assert process.poll() is None, said
            too_long.cancel()
            names = redis_keys.workers(QUEUE)
            wait_until(lambda: any(b":run-ask-" in name for name in redis.smembers(names)))
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=30)
        assert process.returncode == 130
        assert (b"the worker that served" in said) is not is_near
        assert left_behind(redis) == []
