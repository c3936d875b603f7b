"""What the queue leaves of a second worker: real workers and a real Redis, engines that sleep.

    python tests/benchmarks/plan/bench_two.py [--repeats 9] [--rows 1080] [--json FILE]

The engines take as long as an H200 does with Qwen3-4B's shape, 64 slots, and rows of
``bench_pair.py --workload shared``: 0.082 s for the prompts of 64 rows, 9 ms for each of the 16
steps of their answers, and 0.045 s for each prefix of 40 rows, once it has the first of them. Each
time is between 0.8 and 1.3 times as long. Nothing else differs from two GPUs but the machine. First
one worker computes all rows, several times, then two. Timed is from the first row that runs to the
last that ends. ``most`` is the ratio of what one and two have to compute, in waves of 64 rows. No
queue can exceed it by more than these times vary.
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
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

from bench_scale import environment, worker

from batchkv_producer import Client
from batchkv_producer.wire.job import SamplingParams
from batchkv_worker.events import Event, Work
from support import fake_engine
from support.redis_server import running_server

SLOTS, STEPS, PER_GROUP = 64, 16, 40
PREFIX_TOKENS, OWN_TOKENS = 593, 41  # of a prompt
STEP_SECONDS, WAVE_SECONDS = 0.009, 0.082  # of one step, and of the prompts of all slots
TOKEN_SECONDS = WAVE_SECONDS / SLOTS / OWN_TOKENS
PREFIX_SECONDS = 0.045  # of one, in a wave of other prompts
CHUNK_TOKENS = 4096
SHORTEST, LONGEST = 0.8, 1.3  # times as long
LOOK_SECONDS = 0.02
PAUSE_SECONDS = 1.0  # between two batches


class SleepingEngine(fake_engine.FakeEngine):
    """Sleeps until the moment at which its GPU would be done, whatever this process does."""

    _until = 0.0
    _had_rows = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._prefixes: set[str] = set()
        self._prefix_seconds = 0.0  # of those that came since the last step

    def prompt_tokens(self, work: Work) -> int:
        """A prefix counts for its first row."""
        prefix = fake_engine.prompt_of(work)[: 4 * PREFIX_TOKENS]
        if prefix in self._prefixes:
            return OWN_TOKENS
        self._prefixes.add(prefix)
        self._prefix_seconds += PREFIX_SECONDS - PREFIX_TOKENS * TOKEN_SECONDS
        return PREFIX_TOKENS + OWN_TOKENS

    def compute(self, seconds: float) -> None:
        now = time.monotonic()
        seconds, self._prefix_seconds = seconds + self._prefix_seconds, 0.0
        begin = self._until if self._had_rows else now
        self._until = begin + seconds * random.uniform(SHORTEST, LONGEST)
        time.sleep(max(0.0, self._until - now))

    def step(self) -> list[Event]:
        events = super().step()
        self._had_rows = not self.is_idle
        return events


def run_worker() -> None:
    """``batchkv worker`` with this engine, in a process of its own."""
    fake_engine.FakeEngine = SleepingEngine  # type: ignore[misc]
    fake_engine.CHUNK_TOKENS = CHUNK_TOKENS
    fake_engine.main()


def lines_of(number: int, num_rows: int) -> Iterator[dict[str, str]]:
    """Rows of a batch: each group has a prefix that no other batch has."""
    for row in range(num_rows):
        prefix = f"{number} {row // PER_GROUP} ".ljust(4 * PREFIX_TOKENS, "x")
        own = f" {row} slow:{STEPS} ".ljust(4 * OWN_TOKENS, "x")
        yield {"custom_id": f"{row}", "prompt": prefix + own}


def measure(num_workers: int, repeats: int, num_rows: int) -> list[float]:
    """Seconds of each batch but the first, with which the workers learn their speed."""
    command = [sys.executable, __file__, "-m", "fake", "--slots", str(SLOTS)]
    plan = {"step_seconds": STEP_SECONDS, "step_tokens": 1}
    plan["prompt_token_seconds"] = TOKEN_SECONDS
    found = []
    with tempfile.TemporaryDirectory() as name, running_server() as server, ExitStack() as workers:
        folder, client = Path(name), Client(server.connect())
        for _ in range(num_workers):
            more = {"FAKE_PLAN": json.dumps(plan)}
            workers.enter_context(worker(command, environment(server, folder, **more)))
        for number in range(repeats + 1):
            path = folder / f"{number}.jsonl"
            path.write_text("".join(json.dumps(line) + "\n" for line in lines_of(number, num_rows)))
            seconds = timed(client, path)
            if number:
                found.append(seconds)
                print(f"{num_workers} {seconds:.2f} s", flush=True)
            time.sleep(PAUSE_SECONDS)
    return found


def least_seconds(num_rows: int) -> float:
    """What one worker has to compute for so many rows, where no time varies."""
    steps = -(-num_rows // SLOTS) * STEPS * STEP_SECONDS
    prompts = num_rows * OWN_TOKENS * TOKEN_SECONDS
    return steps + prompts + num_rows / PER_GROUP * PREFIX_SECONDS


def timed(client: Client, path: Path) -> float:
    """From the first row that runs to the last that ends."""
    defaults = SamplingParams(max_tokens=STEPS, temperature=0.0)
    batch_id = client.submit(path, model="fake", defaults=defaults).batch_id
    first = None
    while not (status := client.status(batch_id)).is_done:
        if first is None and status.running + status.num_ended:
            first = time.perf_counter()
        time.sleep(LOOK_SECONDS)
    assert status.ok == status.total, status.reconciliation()
    return time.perf_counter() - (first or 0.0)


def main() -> int:
    if "-m" in sys.argv:
        run_worker()
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--rows", type=int, default=1080)
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    args = parser.parse_args()
    one, two = (measure(count, args.repeats, args.rows) for count in (1, 2))
    base = statistics.median(one)
    ratios = sorted(base / seconds for seconds in two)
    most = least_seconds(args.rows) / least_seconds(-(-args.rows // 2))
    shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    print(f"one / two: {statistics.median(ratios):.2f} ({shown}), most {most:.2f}")
    if args.json:
        found = {"rows": args.rows, "one": one, "two": two, "ratios": ratios}
        args.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
