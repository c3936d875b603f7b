"""How unequal workers share a queue: real workers and a real Redis, but engines that sleep.

    python tests/benchmarks/plan/bench_share.py [--queue short] [--json FILE]

Four workers have the speeds 1, 1, 0.5 and 0.2. Each queue is measured twice: at first no speed is
known. ``least`` is the time of all work at the sum of the speeds, with all slots full, which no end
of a queue has. ``best`` is the time if each worker has as many whole rows from the start as is best
for it; ``ratio`` is the time over that. ``idle`` is the share of the workers' time in which no
engine computed. ``begun anew``: rows that were computed and went to another worker.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

from bench_scale import SUSPENDED, environment, worker

from batchkv_producer import Client
from batchkv_producer.wire import transitions
from batchkv_producer.wire.job import Request, SamplingParams
from batchkv_worker.events import Work
from support import fake_engine
from support.redis_server import running_server

SPEEDS = (1.0, 1.0, 0.5, 0.2)
SLOTS = 16
STEP_SECONDS, PROMPT_TOKEN_SECONDS = 0.02, 1 / 4000  # at speed 1
TALLY = "SHARE_TALLY"  # a file to which the worker writes its counts
TALLY_SECONDS = 0.5
PRECISION_SECONDS = 0.005  # of the best time

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one kind."""

    count: int
    prompt_tokens: int
    steps: int

    def prompts(self, name: str) -> list[str]:
        """Their texts; no two share a beginning."""
        return [
            f"{name} {number} slow:{self.steps} ".ljust(4 * self.prompt_tokens, "x")
            for number in range(self.count)
        ]

    @property
    def seconds(self) -> float:
        """What one worker of speed 1 needs, with all slots full."""
        decode = self.count * self.steps / SLOTS * STEP_SECONDS
        return self.count * self.prompt_tokens * PROMPT_TOKEN_SECONDS + decode

    @property
    def best(self) -> float:
        """The time if each worker has as many rows as is best from the start. Rows are whole."""
        low, high = 0.0, alone(self, self.count) / max(SPEEDS)
        while high - low > PRECISION_SECONDS:
            middle = (low + high) / 2
            num_done = sum(self._num_done(middle * speed) for speed in SPEEDS)
            low, high = (low, middle) if num_done >= self.count else (middle, high)
        return high

    def _num_done(self, seconds: float) -> int:
        """How many rows one worker of speed 1 can do in so many seconds."""
        numbers = range(1, self.count + 1)
        return bisect_right(numbers, seconds, key=lambda number: alone(self, number))


QUEUES = {
    "few large prompts": Rows(24, 6_000, 8),
    "many short rows": Rows(2_400, 12, 8),
    "long answers": Rows(160, 40, 160),
    "one row": Rows(1, 40, 8),
}


@cache
def alone(rows: Rows, number: int) -> float:
    """How long an engine of speed 1 computes so many of the rows, in seconds."""
    plan = fake_engine.FakePlan(
        step_seconds=STEP_SECONDS, step_tokens=1, prompt_token_seconds=PROMPT_TOKEN_SECONDS
    )
    engine = Timeless(SLOTS, number, plan)
    for at, text in enumerate(rows.prompts("timed")[:number]):
        engine.add(Work(f"{at}", Request(f"{at}", "completion", prompt=text)))
    while not engine.is_idle:
        engine.step()
    return engine.busy_seconds


class Timeless(fake_engine.FakeEngine):
    """Only counts the time that it takes."""

    def compute(self, seconds: float) -> None:
        pass


class Counted(transitions.Transitions):
    """Counts how often jobs are pulled, and how many go back."""

    counts: ClassVar[Counter[str]] = Counter()

    def pull_run(self, *args: Any, **options: Any) -> transitions.Run:
        run = super().pull_run(*args, **options)
        self.counts["pulls"] += 1
        self.counts["empty"] += not run.jobs
        self.counts["pulled"] += len(run.jobs)
        return run

    def give_back(self, queue: str, held: Any, **options: Any) -> int:
        leases = list(held)
        self.counts["returned"] += len(leases)
        return super().give_back(queue, leases, **options)


class CountedEngine(fake_engine.FakeEngine):
    """Writes the counts while it works, and when it rests."""

    _at = _until = 0.0
    _had_rows = False

    def compute(self, seconds: float) -> None:
        """What other processes of this machine take between two steps does not count."""
        now = time.monotonic()
        self._until = (self._until if self._had_rows else now) + seconds
        time.sleep(max(0.0, self._until - now))

    def step(self) -> Any:
        events = super().step()
        self._had_rows = not self.is_idle
        self._tally()
        return events

    def cancel(self, job_id: str) -> None:
        num_decoding = len(self._decoding)
        super().cancel(job_id)
        Counted.counts["begun anew"] += num_decoding - len(self._decoding)
        self._tally()

    def _tally(self) -> None:
        if self.is_idle or time.monotonic() - self._at >= TALLY_SECONDS:
            self._at = time.monotonic()
            found = {**Counted.counts, "busy": self.busy_seconds}
            path = Path(os.environ[TALLY])
            path.with_suffix(".new").write_text(json.dumps(found))
            path.with_suffix(".new").rename(path)


def run_worker() -> None:
    """``batchkv worker`` with these classes, in a process of its own."""
    from batchkv_worker.queue import redis_side

    redis_side.Transitions = Counted  # type: ignore[misc, attr-defined]
    fake_engine.FakeEngine = CountedEngine  # type: ignore[misc]
    fake_engine.main()


def measure(name: str, rows: Rows, folder: Path) -> list[Figures]:
    """The same rows twice."""
    command = [sys.executable, __file__, "-m", "fake", "--slots", str(SLOTS)]
    tallies = [folder / f"{number}.json" for number in range(len(SPEEDS))]
    found = []
    with running_server() as server, ExitStack() as workers:
        connection = server.connect()
        client = Client(connection)
        connection.set(SUSPENDED, 1)
        for speed, tally in zip(SPEEDS, tallies, strict=True):
            plan = {"step_seconds": STEP_SECONDS / speed, "step_tokens": 1}
            plan["prompt_token_seconds"] = PROMPT_TOKEN_SECONDS / speed
            more = {TALLY: str(tally), "FAKE_PLAN": json.dumps(plan)}
            workers.enter_context(worker(command, environment(server, folder, **more)))
        for number in range(2):
            path = folder / f"{number}.jsonl"
            lines = [
                {"custom_id": f"{at}", "prompt": text}
                for at, text in enumerate(rows.prompts(f"batch{number}"))
            ]
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
            defaults = SamplingParams(max_tokens=rows.steps, temperature=0.0)
            before = read(tallies)
            batch_id = client.submit(path, model="fake", defaults=defaults).batch_id
            connection.delete(SUSPENDED)
            begin = time.perf_counter()
            while not (status := client.status(batch_id)).is_done:
                time.sleep(0.02)
            seconds = time.perf_counter() - begin
            assert status.ok == status.total, status.reconciliation()
            time.sleep(2 * TALLY_SECONDS)
            found.append(summary(name, rows, seconds, before, read(tallies)))
            time.sleep(2.0)  # all know that the queue is empty
    return found


def read(tallies: Sequence[Path]) -> list[Figures]:
    """The counts of each worker so far."""
    return [json.loads(path.read_text()) if path.exists() else {} for path in tallies]


def summary(
    name: str, rows: Rows, seconds: float, before: Sequence[Figures], after: Sequence[Figures]
) -> Figures:
    """Times, and what was counted by all workers meanwhile."""
    least, best = rows.seconds / sum(SPEEDS), rows.best
    names = ("pulls", "empty", "pulled", "returned", "begun anew", "busy")
    counts = {
        each: sum(
            new.get(each, 0) - old.get(each, 0) for old, new in zip(before, after, strict=True)
        )
        for each in names
    }
    idle = max(0.0, 1 - counts.pop("busy") / seconds / len(SPEEDS))
    times = {"seconds": round(seconds, 2), "least": round(least, 2), "best": round(best, 2)}
    times |= {"ratio": round(seconds / best, 3), "idle": round(idle, 3)}
    return {"queue": name, **times, **counts}


def main() -> int:
    if "-m" in sys.argv:
        run_worker()
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--queue", default="", help="only queues whose names have this word")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    arguments = parser.parse_args()
    found: list[Figures] = []
    for name, rows in QUEUES.items():
        if arguments.queue in name:
            with tempfile.TemporaryDirectory() as folder:
                for figures in measure(name, rows, Path(folder)):
                    found.append(figures)
                    print(" ".join(f"{key}={value}" for key, value in figures.items()), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
