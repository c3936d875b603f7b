"""A file of rows as a user runs it: ``batchkv run`` on a server of its own, beside the engine."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from redis import Redis

from batchkv_producer.client import Client
from batchkv_producer.intake.formats import Row, read_rows
from batchkv_producer.server import embedded
from batchkv_producer.server.home import Home
from batchkv_worker.bench.batches import bound
from batchkv_worker.bench.bounds import Cost, Rates
from batchkv_worker.bench.workloads import Workload
from batchkv_worker.engine.engine import Engine
from batchkv_worker.errors import SettingsError
from batchkv_worker.events import Completed, Work
from batchkv_worker.model.loader import LoadedModel

PREFIX_WORDS, OWN_WORDS, ANSWER_TOKENS = 400, 30, 16
GROUPS = 4  # of rows with a prefix of their own
LOOK_SECONDS = 0.02  # between two looks at the batch
_TEXT = (
    "the of and to in is that it for was on are as with his they at be this from have or by one "
    "had not but what all were when we there can an your which their said if do will each about "
    "how up out them then she many some so these would other into has more her two like him see "
    "time could no make than first been its who now people my made over did down only way find"
)
_WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds from the first running row to the last ended one, and before the first."""

    seconds: float
    start_seconds: float
    generated: int


def write_rows(file: Path, count: int) -> None:
    """``count`` rows in groups that share their beginning, each one a line of JSON."""
    rng = random.Random(7)

    def words(number: int) -> str:
        return " ".join(rng.choices(_WORDS, k=number))

    prefixes = [words(PREFIX_WORDS) for _ in range(GROUPS)]
    lines = []
    for index in range(count):
        prompt = f"{prefixes[index * GROUPS // count]} {words(OWN_WORDS)}"
        body = {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0}
        line = {"custom_id": str(index), "method": "POST", "url": "/v1/completions", "body": body}
        lines.append(json.dumps(line) + "\n")
    file.write_text("".join(lines), "utf-8")


def rows_of(file: Path) -> list[Row]:
    """The rows of a file, as ``batchkv run`` reads them."""
    with file.open("rb") as stream:
        return [row for row in read_rows(stream, is_text=False) if isinstance(row, Row)]


def bound_of(file: Path, loaded: LoadedModel, slots: int, cost: Cost, rates: Rates) -> float:
    """The least seconds for the rows of a file; see ``batches.bound``."""
    encode = loaded.tokenizer.encode
    prompts = [[*map(int, encode(row.request.prompt))] for row in rows_of(file)]
    workload = Workload("", prompts, [ANSWER_TOKENS] * len(prompts))
    return bound(workload, slots, cost, rates)


def run_engine(engine: Engine, file: Path) -> Timed:
    """All rows of the file handed to the engine at once, and no queue."""
    rows = rows_of(file)
    begin = time.perf_counter()
    for row in rows:
        engine.add(Work(str(row.line), row.request))
    generated = 0
    while not engine.is_idle:
        for event in engine.step():
            assert isinstance(event, Completed), event
            generated += event.usage.completion
    seconds = time.perf_counter() - begin
    engine.prefixes.clear()
    return Timed(seconds, 0.0, generated)


def run_product(file: Path, model: str, scheme: str, limit_seconds: float) -> Timed:
    """``batchkv run`` in an empty home, with a server and a worker of its own.

    Raises SettingsError with the end of what the command printed if it fails or takes longer than
    ``limit_seconds``.
    """
    folder = Path(tempfile.mkdtemp(prefix="bkv-bench-", dir="/tmp"))  # sockets want a short path
    home = Home(folder)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("BATCHKV_")}
    environment["BATCHKV_HOME"] = str(folder)
    command = [sys.executable, "-P", "-m", "batchkv_producer", "run", str(file), "-m", model]
    command += ["--kv-scheme", scheme, "-o", str(folder / "out.jsonl")]
    try:
        connection = Redis.from_url(embedded.ensure_running(home))
        try:
            return _timed(Client(connection), lambda: _run(command, environment, limit_seconds))
        finally:
            connection.close()
            embedded.stop(home)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(command: list[str], environment: dict[str, str], limit_seconds: float) -> None:
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_seconds,
        )
    except subprocess.TimeoutExpired as fault:
        raise SettingsError(f"batchkv run took longer than {limit_seconds:.0f} s") from fault
    if done.returncode:
        said = " ".join(done.stderr.split())[-500:]
        raise SettingsError(f"batchkv run ended with exit code {done.returncode}: {said}")


def _timed(client: Client, work: Callable[[], None]) -> Timed:
    """Do it, and look from outside when its batch's first row runs and its last one ends."""
    moments: dict[str, float] = {}
    is_over = threading.Event()

    def look() -> None:
        while "end" not in moments:
            is_last = is_over.is_set()
            for batch in client.list_batches()[:1]:
                if batch.running + batch.num_ended:
                    moments.setdefault("first", time.monotonic())
                if batch.is_done:
                    moments["end"] = time.monotonic()
            if is_last:
                return
            time.sleep(LOOK_SECONDS)

    watcher = threading.Thread(target=look)
    begin = time.monotonic()
    watcher.start()
    try:
        work()
    finally:
        is_over.set()
        watcher.join()
    (batch,) = client.list_batches()
    if batch.ok != batch.total:
        raise SettingsError(f"batchkv run: {batch.total - batch.ok} of {batch.total} rows failed")
    first, end = moments["first"], moments["end"]
    return Timed(end - first, first - begin, batch.completion_tokens)
