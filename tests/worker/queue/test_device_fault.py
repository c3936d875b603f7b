"""The real engine in a real worker on a device that fails: no row is lost, none is blamed."""

from __future__ import annotations

from pathlib import Path

from redis import Redis

from batchkv_producer.wire import redis_keys
from support.worker_harness import (
    FAKE_CLASS,
    QUEUE,
    WorkerProcess,
    assert_reconciled,
    counts_of,
    submit,
    workers,
)

TINY_CLASS = "support.tiny_worker.TinyWorker"
PROMPTS = [" ".join(str(7 * line + place) for place in range(5 + line)) for line in range(6)]


def run(url: str, log: Path, worker_class: str, faults: list[int]) -> tuple[int, str]:
    """A worker that ends with the queue, whose device fails in these decode steps: code, log."""
    plan: dict[str, object] = {"faults": faults} if faults else {}
    settings: dict[str, object] = {"SLOTS": 3, "PREFETCH": 1}
    worker = WorkerProcess(
        *(url, log, "--burst"), plan=plan, settings=settings, worker_class=worker_class
    )
    with workers(worker):
        return worker.wait(60), worker.said


def test_rows_of_a_failed_device_go_to_another_worker(
    redis_connection: Redis, redis_url: str, tmp_path: Path
) -> None:
    """One failure is survived. After the second the worker ends; no row has a death."""
    batch = submit(redis_connection, PROMPTS)
    code, said = run(redis_url, tmp_path / "first", TINY_CLASS, [3, 9])
    assert code == 74
    assert "3 of 3 rows are computed again, prompts in chunks of 256 tokens" in said
    assert "the jobs went back to the queue, and no death of theirs is counted" in said
    assert redis_connection.llen(redis_keys.queue(QUEUE)) == len(PROMPTS)
    assert counts_of(redis_connection, batch)["running"] == 0
    assert run(redis_url, tmp_path / "second", FAKE_CLASS, [])[0] == 0
    assert_reconciled(redis_connection, batch)
    assert counts_of(redis_connection, batch)["ok"] == len(PROMPTS)
    for line in range(1, len(PROMPTS) + 1):
        assert redis_connection.hget(f"rq:job:{batch}-{line}", "bkv_deaths") is None
