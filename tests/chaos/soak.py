"""A worker under mixed load for a long time: what it holds must stay as it is.

    python tests/chaos/soak.py [--minutes 30] [--seed N] [--json FILE]

One worker process (all of the product, on a tiny model, its cache on disk) gets batch after batch:
short and long prompts, shared prefixes, rows that are refused, rows that are canceled. Twice a
second its memory (VmRSS), file descriptors and threads are read from /proc, MLX's live arrays and
active bytes are told by the worker itself, memory by Redis. Old batches are removed, all of their
keys, as nobody else does it. Keys of Redis are counted without those of batches that are there, for
these come and go by dozens; one that a removed batch has left behind is counted.

The figure is the drift from the median of the second quarter to that of the last one.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from redis import Redis

sys.path.insert(0, str(Path(__file__).parents[1]))

from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.job import Request, Result, SamplingParams, encode_job, encode_result
from batchkv_producer.wire.transitions import Transitions
from support.redis_server import running_server
from support.tiny_worker import COMMAND_CLASS
from support.worker_harness import MODEL, QUEUE, WorkerProcess

SAMPLE_SECONDS = 0.5
BATCH_ROWS = 40
KEPT_BATCHES = 4
MAX_DRIFT = 0.02
ENOUGH_SECONDS = 90.0  # on a busy machine, until a short soak has something to compare
SETTINGS: dict[str, object] = {
    **{"SLOTS": 6, "PREFETCH": 2, "KV_SCHEME": "affine8", "MEMORY": "32MiB"},
    **{"LEASE_SECONDS": 10, "HEARTBEAT_SECONDS": 1, "MAINTENANCE_SECONDS": 2},
}


@dataclass(frozen=True, slots=True)
class Drift:
    """Medians of the second and of the last quarter, and how much the last one is larger."""

    second: float
    last: float

    @property
    def share(self) -> float:
        """0.01: a hundredth more at the end. Less at the end is no drift."""
        return max(0.0, self.last / self.second - 1) if self.second else float(self.last > 0)


class Load:
    """Batches, one after the other; the queue is never empty and never long."""

    def __init__(self, connection: Redis, seed: int) -> None:
        self._connection = connection
        self._moves = Transitions(connection)
        self._random = random.Random(seed)
        self._prefixes = [self._tokens(self._random.choice((280, 300, 540))) for _ in range(24)]
        self.batches: list[str] = []
        self.num_rows = self.num_canceled = self.num_batches = 0

    def tend(self) -> None:
        """Add a batch when little waits, cancel a row now and then, remove what is old."""
        if self._connection.llen(redis_keys.queue(QUEUE)) < BATCH_ROWS // 2:
            self._add()
        if self.batches and self._random.random() < 0.3:
            self._cancel(self.batches[-1])
        for batch in self.batches[:-KEPT_BATCHES]:
            if self._is_done(batch):
                self._remove(batch)
                self.batches.remove(batch)

    def _tokens(self, count: int) -> str:
        return " ".join(str(self._random.randrange(512)) for _ in range(count))

    def _prompt(self) -> str:
        kind = self._random.random()
        if kind < 0.4:
            return f"{self._random.choice(self._prefixes)} {self._tokens(10)}"
        if kind < 0.45:
            return "9999"  # the model has no such token: the row is refused
        return self._tokens(self._random.choice((1, 5, 40, 120, 400)))

    def _add(self) -> None:
        self.num_batches += 1
        batch = f"{self.num_batches:016x}"
        fields: dict[str, str | int] = {"digest": "0" * 64, "name": "soak", "model": MODEL}
        fields |= {"queue": QUEUE, "total": BATCH_ROWS, "num_chunks": 1}
        self._moves.create(batch, fields)
        jobs = []
        for line in range(1, BATCH_ROWS + 1):
            params = SamplingParams(
                max_tokens=self._random.choice((1, 8, 30, 60)),
                n=self._random.choice((None, None, None, None, 2, 6)),
            )
            request = Request(f"c{line}", "completion", prompt=self._prompt(), params=params)
            jobs.append((line, encode_job(request), 0))
        self._moves.submit(batch, QUEUE, 0, jobs, [], 3600)
        self.batches.append(batch)
        self.num_rows += BATCH_ROWS

    def _cancel(self, batch: str) -> None:
        line = self._random.randint(1, BATCH_ROWS)
        row = encode_result(Result(f"c{line}", "completion", "canceled", error=("canceled", "so")))
        verdicts = self._moves.settle(QUEUE, "canceled", [(redis_keys.job_id(batch, line), row)])
        self.num_canceled += verdicts != [""]

    def _is_done(self, batch: str) -> bool:
        return bool(self._connection.hlen(redis_keys.results(batch)) == BATCH_ROWS)

    def _remove(self, batch: str) -> None:
        ids = [redis_keys.job_id(batch, line) for line in range(1, BATCH_ROWS + 1)]
        for kind in ("finished", "failed", "canceled"):
            self._connection.zrem(redis_keys.registry(kind, QUEUE), *ids)
        own = (redis_keys.batch(batch), redis_keys.results(batch), redis_keys.done(batch))
        self._connection.delete(*map(redis_keys.job, ids), *own)
        self._connection.zrem(redis_keys.BATCHES, batch)


class Readings:
    """Numbers by name, sample by sample."""

    def __init__(self, worker: WorkerProcess, vitals: Path, load: Load, connection: Redis) -> None:
        self._worker, self._diagnostics, self._connection = worker, vitals, connection
        self._load = load
        self.values: dict[str, list[float]] = {}

    @property
    def are_enough(self) -> bool:
        """Whether each quarter has some, and rows of every kind have come by."""
        told = len(self._diagnostics.read_text().splitlines()) if self._diagnostics.exists() else 0
        num_samples = min(told, len(self.values.get("rss_kb", ())))
        return num_samples >= 8 and self._load.num_batches >= 3 and self._load.num_canceled >= 1

    def take(self) -> None:
        """One sample of all that is read from outside."""
        pid = self._worker.process.pid
        status = Path(f"/proc/{pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        self._add("rss_kb", float(fields["VmRSS"].split()[0]))
        self._add("threads", float(fields["Threads"]))
        self._add("descriptors", float(len(list(Path(f"/proc/{pid}/fd").iterdir()))))
        keys = (key.decode() for key in self._connection.scan_iter(count=1000))
        others = [key for key in keys if not any(batch in key for batch in self._load.batches)]
        self._add("redis_keys", float(len(others)))
        self._add("redis_bytes", float(self._connection.info("memory")["used_memory"]))

    def close(self) -> None:
        """Read what the worker has told of itself."""
        told = [json.loads(line) for line in self._diagnostics.read_text().splitlines()]
        for name in ("arrays", "active", "cached"):
            self.values[f"mlx_{name}"] = [float(line[name]) for line in told]

    def drifts(self) -> dict[str, Drift]:
        """Of each number."""
        return {name: drift(values) for name, values in self.values.items()}

    def _add(self, name: str, value: float) -> None:
        self.values.setdefault(name, []).append(value)


def drift(values: list[float]) -> Drift:
    """From the second to the last quarter."""
    quarter = len(values) // 4
    return Drift(
        statistics.median(values[quarter : 2 * quarter]), statistics.median(values[-quarter:])
    )


@contextmanager
def soaking(folder: Path, seed: int) -> Iterator[tuple[Load, Readings, WorkerProcess]]:
    """A server and a worker at work; at the end the worker has to stop well."""
    vitals = folder / "vitals.jsonl"
    with running_server() as server:
        worker = WorkerProcess(
            *(server.url, folder / "worker.log"),
            worker_class=COMMAND_CLASS,
            plan={"step_seconds": 0.004, "vitals": str(vitals)},
            settings={**SETTINGS, "CACHE": f"disk:{folder}/blocks?max=16MB"},
        )
        try:
            connection = server.connect()
            load = Load(connection, seed)
            yield load, Readings(worker, vitals, load, connection), worker
        finally:
            worker.end()


def soak(folder: Path, seconds: float, seed: int) -> tuple[Readings, Load]:
    """Load for so long, counted from the first step; what was read meanwhile."""
    with soaking(folder, seed) as (load, readings, worker):
        load.tend()
        ready_by = time.monotonic() + 60
        while "the engine is ready" not in worker.said:
            assert time.monotonic() < ready_by and worker.process.poll() is None, worker.said
            time.sleep(0.05)
        until = time.monotonic() + seconds
        while time.monotonic() < until or not readings.are_enough:
            assert time.monotonic() < until + ENOUGH_SECONDS, "the worker gets no work done"
            assert worker.process.poll() is None, worker.said
            load.tend()
            if load.num_batches > 1:  # the first rows open what stays open: connections, threads
                readings.take()
            time.sleep(SAMPLE_SECONDS)
        readings.close()
        return readings, load


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bkv-soak-", dir="/tmp") as folder:
        readings, load = soak(Path(folder), options.minutes * 60, options.seed)
    drifts = readings.drifts()
    print(f"{load.num_batches} batches, {load.num_rows} rows, {load.num_canceled} canceled")
    print(f"{'':14} {'2nd quarter':>14} {'last quarter':>14} {'drift':>8}")
    for name, found in drifts.items():
        print(f"{name:14} {found.second:14,.0f} {found.last:14,.0f} {found.share:8.2%}")
    if options.json:
        options.json.write_text(json.dumps(readings.values), "utf-8")
    worst = max(found.share for found in drifts.values())
    print(f"largest drift {worst:.2%}, {'at most' if worst <= MAX_DRIFT else 'more than'} 2 %")
    return 0 if worst <= MAX_DRIFT else 1


if __name__ == "__main__":
    sys.exit(main())
