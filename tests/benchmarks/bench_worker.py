"""What the queue costs: jobs through one worker whose engine does nothing.

    python tests/benchmarks/bench_worker.py            # 20,000 small jobs, then 5,000 long answers
    python tests/benchmarks/bench_worker.py --profile  # where the main thread spends its time

Starts a server of its own on a unix socket and runs the worker in this process, its engine on its
own thread. Targets: 3,000 jobs/s with result, counters and finish order; 0.3 round trips a job;
750 bytes of Redis for a finished job with a 1,000-character answer once RQ's keys have expired.
A round trip is one write to the server's socket that waits for an answer: a script call, a
pipeline, or a single command. Exit code 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import random
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pydoc_data import topics
from typing import Any

from redis import Redis
from redis.connection import AbstractConnection

sys.path.insert(0, str(Path(__file__).parents[1]))

from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.transitions import Transitions
from batchkv_worker.queue.rq_worker import BatchWorker
from batchkv_worker.settings import WorkerSettings
from support.fake_engine import FakeEngine, FakePlan, rows_of
from support.redis_server import running_server
from support.worker_harness import MODEL, QUEUE, assert_reconciled, submit

TARGETS = {"jobs_per_second": 3_000.0, "round_trips_per_job": 0.3, "bytes_per_job": 750.0}
ANSWER_CHARS = 1_000


def english() -> str:
    """Half a megabyte of prose that every Python brings along: its own language reference."""
    text = " ".join(str(value) for value in topics.topics.values())
    text = re.sub(r"\s+", " ", text)
    return re.sub(r"[^A-Za-z0-9 .,;:()?!-]|[-*=^]{3,}", "", text)


class Reader(FakeEngine):
    """Answers with a thousand characters of text, another passage for each row."""

    text = ""
    rng = random.Random(7)

    def _end(self, work: Any) -> Any:
        event = super()._end(work)
        start = self.rng.randrange(len(self.text) - ANSWER_CHARS)
        object.__setattr__(event, "text", self.text[start : start + ANSWER_CHARS])
        return event


@contextmanager
def counted_writes() -> Iterator[list[int]]:
    """Count what this process sends to Redis: one round trip each."""
    count = [0]
    original = AbstractConnection.send_packed_command

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return original(self, *args, **kwargs)

    AbstractConnection.send_packed_command = counting  # type: ignore[method-assign]
    try:
        yield count
    finally:
        AbstractConnection.send_packed_command = original  # type: ignore[method-assign]


def run_worker(connection: Redis, engine: type[FakeEngine], profile: bool = False) -> float:
    """Work the queue off; wall seconds from the first pull to the last result."""
    settings = WorkerSettings(model=MODEL)

    class Worker(BatchWorker):
        @staticmethod
        def engine_factory(settings: WorkerSettings) -> FakeEngine:
            return engine(*rows_of(settings), FakePlan())

    worker = Worker([QUEUE], connection=connection, settings=settings)
    profiler = cProfile.Profile() if profile else None
    started = time.perf_counter()
    if profiler:
        profiler.enable()
    worker.work(burst=True, logging_level="WARNING")
    if profiler:
        profiler.disable()
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(35)
    return time.perf_counter() - started


def measure_speed(num_jobs: int, profile: bool) -> dict[str, float]:
    """Small prompts and answers through one worker."""
    with running_server() as server, server.connect() as connection:
        batch_id = submit(connection, [f"What is {i} plus {i}?" for i in range(num_jobs)])
        before = _server_cpu(connection)
        own = time.process_time()
        with counted_writes() as writes:
            seconds = run_worker(server.connect(), FakeEngine, profile)
        own = time.process_time() - own
        assert_reconciled(connection, batch_id)
        return {
            "jobs": num_jobs,
            "seconds": seconds,
            "jobs_per_second": num_jobs / seconds,
            "round_trips_per_job": writes[0] / num_jobs,
            "worker_cpu_ms_per_job": own / num_jobs * 1e3,
            "server_cpu_ms_per_job": (_server_cpu(connection) - before) / num_jobs * 1e3,
        }


def measure_memory(num_jobs: int) -> dict[str, float]:
    """Bytes of the server's data for each finished job, RQ's keys expired."""
    Reader.text = english()
    with running_server() as server, server.connect() as connection:
        Transitions(connection)
        submit(connection, ["warm up"], name="warm")
        run_worker(server.connect(), Reader)
        _expire_rq(connection)
        before = int(connection.info("memory")["used_memory_dataset"])
        batch_id = submit(connection, [f"Tell me about {i}" for i in range(num_jobs)])
        run_worker(server.connect(), Reader)
        _expire_rq(connection)
        after = int(connection.info("memory")["used_memory_dataset"])
        blobs = connection.hvals(redis_keys.results(batch_id))
        return {
            "finished_jobs": num_jobs,
            "bytes_per_job": (after - before) / num_jobs,
            "encoded_bytes_per_result": sum(len(blob) for blob in blobs) / num_jobs,
        }


def _expire_rq(connection: Redis) -> None:
    """What RQ's own times to live would do a little later."""
    keys = list(connection.scan_iter("rq:*", count=1000))
    for start in range(0, len(keys), 1000):
        connection.delete(*keys[start : start + 1000])


def _server_cpu(connection: Redis) -> float:
    cpu = connection.info("cpu")
    return float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"])


def report(figures: dict[str, float]) -> bool:
    """Print the table; whether every target is met."""
    is_met = True
    for name, value in figures.items():
        target = TARGETS.get(name)
        note = ""
        if target is not None:
            good = value >= target if name == "jobs_per_second" else value <= target
            is_met &= good
            note = f"  target {target:g}: {'met' if good else 'MISSED'}"
        print(f"{name:<26} {value:>12,.3f}{note}")
    return is_met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--memory-jobs", type=int, default=5_000)
    parser.add_argument("--quick", action="store_true", help="a tenth of the jobs")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    arguments = parser.parse_args()
    share = 10 if arguments.quick else 1
    for name in [name for name in os.environ if name.startswith("BATCHKV_")]:
        del os.environ[name]
    figures = measure_speed(arguments.jobs // share, arguments.profile)
    figures |= measure_memory(arguments.memory_jobs // share)
    is_met = report(figures)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", "utf-8")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
