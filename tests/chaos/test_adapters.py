"""Workers that exchange adapters, under kills and outages: every row once, with its own adapter."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import RedisError

from batchkv_producer import Client
from batchkv_producer.wire import redis_keys
from batchkv_worker.settings import WorkerSettings
from chaos.storm import AOF
from support.adapter_files import write_files
from support.redis_server import RedisServer, running_server
from support.worker_harness import (
    MODEL,
    QUICK_LEASES,
    WorkerProcess,
    assert_reconciled,
    num_ended,
    results_of,
    wait_until,
    workers,
)

IS_LONG = os.environ.get("BATCHKV_CHAOS", "") == "long"
SEED = int(os.environ.get("CHAOS_SEED", "1"))
ADAPTERS = ("", "a", "b")
NUM_WORKERS = 3 if IS_LONG else 2


class Crew:
    """Workers of the model and two adapters, which are started again when they end."""

    def __init__(self, server: RedisServer, folder: Path) -> None:
        self._server, self._folder = server, folder
        adapters = ",".join(f"{name}={write_files(folder / name)}" for name in ADAPTERS[1:])
        self._settings = {**QUICK_LEASES, "ADAPTERS": adapters, "SLOTS": 4, "PREFETCH": 2}
        self.processes = [self._start(number) for number in range(NUM_WORKERS)]

    def _start(self, number: int) -> WorkerProcess:
        plan: dict[str, object] = {"step_seconds": 0.01, "steps": 15}
        log = self._folder / f"{number}.log"
        return WorkerProcess(self._server.url, log, plan=plan, settings=self._settings)

    def tend(self, until: float) -> None:
        """Until then, start workers that have ended."""
        while time.monotonic() < until:
            for number, worker in enumerate(self.processes):
                if worker.process.poll() is not None:
                    self.processes[number] = self._start(number)
            time.sleep(0.01)


def submit_all(server: RedisServer, folder: Path, count: int, num_rows: int) -> dict[str, str]:
    """Batches in turn for the model alone and for each adapter: batch id -> adapter."""
    found: dict[str, str] = {}
    with server.connect() as connection:
        for number in range(count):
            name = ADAPTERS[number % len(ADAPTERS)]
            path = folder / f"{number}.jsonl"
            rows = (json.dumps({"prompt": f"{number} {row}"}) for row in range(num_rows))
            path.write_text("\n".join(rows) + "\n")
            batch = Client(connection).submit(path, model=MODEL, adapter=name or None).batch_id
            connection.hincrby(redis_keys.batch(batch), "created", number - count)
            found[batch] = name
    return found


def is_done(connection: Redis, batches: dict[str, str], num_rows: int) -> bool:
    try:
        return all(num_ended(connection, batch) == num_rows for batch in batches)
    except RedisError:
        return False


@pytest.mark.timeout(600)
def test_rows_of_several_adapters_survive(tmp_path: Path) -> None:
    """Workers die in the middle of rows and of exchanges, and the server goes away for a while."""
    num_kills, num_outages, num_batches, num_rows = (60, 4, 30, 60) if IS_LONG else (3, 1, 6, 15)
    rng = random.Random(SEED)
    with running_server(*AOF) as server:
        batches = submit_all(server, tmp_path, num_batches, num_rows)
        crew = Crew(server, tmp_path)
        try:
            outages = set(rng.sample(range(num_kills), num_outages))
            for number in range(num_kills):
                crew.tend(time.monotonic() + rng.uniform(0.2, 0.7))
                victim = rng.choice(crew.processes)
                with suppress(ProcessLookupError):
                    victim.process.send_signal(rng.choice((signal.SIGKILL, signal.SIGTERM)))
                if number in outages:
                    server.kill()
                    crew.tend(time.monotonic() + 0.3)
                    server.start()
            connection = server.connect()

            def is_over() -> bool:
                crew.tend(time.monotonic() + 0.05)
                return is_done(connection, batches, num_rows)

            wait_until(is_over, 200.0)
        finally:
            with workers(*crew.processes):
                pass
        settings = WorkerSettings(model=MODEL)
        failed = 0
        for number, (batch, name) in enumerate(batches.items()):
            served = settings.served_name(name)
            assert_reconciled(connection, batch, queue=redis_keys.queue_name(served))
            word = f"echo of {name}" if name else "echo"
            for line, result in results_of(connection, batch).items():
                failed += result.outcome != "ok"
                if result.outcome == "ok":
                    assert (result.text, result.model) == (f"{word} {number} {line - 1}", served)
        assert failed <= num_kills
