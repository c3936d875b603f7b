"""Batches, workers in other processes, and what must hold when they are done."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from redis import Redis

from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.job import Request, Result, decode_result, encode_job
from batchkv_producer.wire.transitions import Transitions

TESTS = Path(__file__).parent.parent
MODEL = "fake"
QUEUE = redis_keys.queue_name(MODEL)
FAKE_CLASS = "support.fake_engine.FakeWorker"
QUICK_LEASES: dict[str, object] = {  # settings under which a lost worker is missed soon
    "LEASE_SECONDS": 2,
    "HEARTBEAT_SECONDS": 0.5,
    "MAINTENANCE_SECONDS": 0.5,
}


def submit(
    connection: Redis,
    prompts: Sequence[str],
    *,
    name: str = "batch",
    timeout_seconds: int = 3600,
    data: Callable[[str], bytes] | None = None,
    priority: str = "normal",
    starts: Collection[int] = (),
) -> str:
    """Queue one job for each prompt, custom ids c1, c2 ...; the batch's id.

    With ``starts``, the lines that begin a prefix, all share something.
    """
    batch_id = hashlib.sha256(name.encode()).hexdigest()[:16]
    moves = Transitions(connection)
    fields: dict[str, str | int] = {"digest": "0" * 64, "name": name, "model": MODEL}
    fields |= {"queue": QUEUE, "total": len(prompts), "num_chunks": 1}
    if priority != "normal":
        fields["priority"] = priority
    moves.create(batch_id, fields)
    jobs = []
    for line, prompt in enumerate(prompts, 1):
        request = Request(custom_id=f"c{line}", endpoint="completion", prompt=prompt)
        shared = 600 if starts else 0
        jobs.append((line, data(prompt) if data else encode_job(request), shared))
    moves.submit(batch_id, QUEUE, 0, jobs, [], timeout_seconds, starts=starts)
    return batch_id


def results_of(connection: Redis, batch_id: str) -> dict[int, Result]:
    """Line number -> result, of those that are there."""
    found = connection.hgetall(redis_keys.results(batch_id))
    return {int(line): decode_result(blob) for line, blob in found.items()}


def counts_of(connection: Redis, batch_id: str) -> dict[str, int]:
    """The batch's counters."""
    names = ("total", "ok", "failed", "canceled", "running")
    values = connection.hmget(redis_keys.batch(batch_id), names)
    return {name: int(value or 0) for name, value in zip(names, values, strict=True)}


def waiting_lines(connection: Redis) -> list[int]:
    """Line numbers in the queue, from its head on."""
    ids = connection.lrange(redis_keys.queue(QUEUE), 0, -1)
    return [int(raw.decode().rpartition("-")[2]) for raw in ids]


def num_ended(connection: Redis, batch_id: str) -> int:
    """How many rows of the batch have a result."""
    return int(connection.hlen(redis_keys.results(batch_id)))


def assert_reconciled(connection: Redis, batch_id: str, *, queue: str = QUEUE) -> None:
    """Every row ended exactly once, and nothing of the batch is left in any place."""
    counts = counts_of(connection, batch_id)
    results = results_of(connection, batch_id)
    done = [int(line) for line in connection.lrange(redis_keys.done(batch_id), 0, -1)]
    lines = list(range(1, counts["total"] + 1))
    assert sorted(done) == lines
    assert sorted(results) == lines
    assert counts["running"] == 0
    assert counts["ok"] + counts["failed"] + counts["canceled"] == counts["total"]
    for outcome in ("ok", "failed"):
        assert sum(row.outcome == outcome for row in results.values()) == counts[outcome]
    assert connection.zcard(redis_keys.registry("wip", queue)) == 0


def wait_until(condition: Callable[[], object], timeout_seconds: float = 60.0) -> None:
    """Poll until true; AssertionError when it takes too long, for a slow and busy machine too."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


class WorkerProcess:
    """A worker in its own process, its output in ``log``."""

    def __init__(
        self,
        url: str,
        log: Path,
        *flags: str,
        plan: dict[str, object] | None = None,
        settings: dict[str, object] | None = None,
        command: Sequence[str] = (),
        stdin: int = subprocess.DEVNULL,
        environ: Mapping[str, str] | None = None,
        worker_class: str = FAKE_CLASS,
    ) -> None:
        kept = {key: value for key, value in os.environ.items() if "BATCHKV" not in key}
        environ = {**kept, **(environ or {})}
        environ |= {"BATCHKV_REDIS_URL": url, "BATCHKV_MODEL": MODEL}
        environ.setdefault("BATCHKV_HOME", str(log.parent / "home"))
        environ |= {"PYTHONPATH": str(TESTS), "FAKE_PLAN": json.dumps(plan or {})}
        environ |= {f"BATCHKV_{key}": str(value) for key, value in (settings or {}).items()}
        rq_worker = (sys.executable, "-m", "rq.cli", "worker", "-c", "batchkv_worker.rq_config")
        chosen = command or (*rq_worker, "-w", worker_class)
        self.log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [*chosen, *flags], env=environ, stdin=stdin, stdout=output, stderr=output
            )

    @property
    def said(self) -> str:
        """All that it wrote so far."""
        return self.log.read_text("utf-8", "replace")

    def wait(self, timeout_seconds: float = 20.0) -> int:
        """Its exit code."""
        return self.process.wait(timeout_seconds)

    def end(self) -> None:
        """Make sure that it is gone."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        if self.process.stdin:
            self.process.stdin.close()


@contextmanager
def workers(*started: WorkerProcess) -> Iterator[tuple[WorkerProcess, ...]]:
    """Ends them all when the block ends."""
    try:
        yield started
    finally:
        for worker in started:
            worker.end()
