"""How many decode steps and chunks of prompts a batch takes: the real scheduler, no tensors.

    python tests/benchmarks/plan/bench_schedule.py [--slots 64] [--quick] [--json FILE]

Rows come as a worker hands them to its engine: in the planner's order, or as they arrived, and so
many ahead of the slots. A step takes as long whatever slots are free, as on a GPU whose host starts
the kernels, and a chunk takes a time of its own besides its tokens. --step, --chunk and --token are
these times in milliseconds; the defaults were measured on an H100 with Qwen3-4B's shape. The last
column is the least time over the time: all slots full in every step, no pads, chunks for nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from batchkv_producer.order.prefix_order import TOKENS_PER_GENERATED
from batchkv_worker.bench.workloads import lognormal
from batchkv_worker.engine.engine import CHUNKS_PER_STEP
from batchkv_worker.engine.live import CHUNKS_BESIDE
from batchkv_worker.engine.schedule.scheduler import Budget, Scheduler
from batchkv_worker.kv.slots.changes import Demand
from batchkv_worker.kv.slots.layouts import Costs, SlotLayouts
from batchkv_worker.sequence import Generation, Status
from batchkv_worker.sequence import Sequence as Row

Lengths = tuple[int, int]  # tokens of a prompt and of its answer
CHUNK_TOKENS, CHUNK_STEPS = 2048, 2.0  # what an engine on CUDA has
AHEAD = 2  # rows for each slot that a worker hands over before there is a slot for them


@dataclass(frozen=True)
class Times:
    """Milliseconds of a decode step, of a chunk besides its tokens, and of a token in it."""

    step: float = 15.4
    chunk: float = 31.0
    token: float = 0.015


@dataclass(frozen=True, slots=True)
class Counted:
    """What a batch took. ``pads`` are tokens of chunks that no prompt has."""

    steps: int
    chunks: int
    tokens: int
    pads: int
    least_steps: float

    def seconds(self, times: Times) -> float:
        tokens = (self.tokens + self.pads) * times.token
        return (self.steps * times.step + self.chunks * times.chunk + tokens) / 1000

    def share(self, times: Times) -> float:
        """The least time over the time."""
        least = self.least_steps * times.step + self.tokens * times.token
        return least / 1000 / self.seconds(times)


class Replay:
    """An engine of numbers with real slots and a real scheduler; it knows how long answers are."""

    def __init__(self, num_slots: int) -> None:
        self.layouts = SlotLayouts(num_slots, in_any_order=True)
        budget = Budget(CHUNK_TOKENS, 2**50, Costs(1), chunk_steps=CHUNK_STEPS)
        self.scheduler = Scheduler(self.layouts, budget)
        self.rows: dict[int, Row] = {}

    def run(self, batch: Sequence[Lengths], ahead: int) -> Counted:
        """Compute all rows; ``ahead`` of them wait for a slot at most."""
        queue = deque(enumerate(batch))
        steps = chunks = padded = 0
        while queue or not self.scheduler.is_idle:
            room = self.layouts.num_slots + ahead - len(self.rows) - self.scheduler.num_waiting
            for number, (length, answer) in [queue.popleft() for _ in range(min(room, len(queue)))]:
                self.scheduler.add(Row(str(number), [1] * length, Generation(answer)))
            is_decoding = bool(self.rows)
            for _ in range(CHUNKS_BESIDE if is_decoding else CHUNKS_PER_STEP):
                group = self.scheduler.next_group(is_decoding=is_decoding)
                if group is None:
                    break
                chunks, padded = chunks + 1, padded + len(group.rows) * group.width
                group.advance(group.width)
                self._join(group.demands)
            steps += 1
            self._step()
        tokens = sum(length - 1 for length, _ in batch)
        least = sum(answer for _, answer in batch) / self.layouts.num_slots
        return Counted(steps, chunks, tokens, padded - tokens, least)

    def _join(self, demands: Sequence[Demand]) -> None:
        for row, demand in zip(self.scheduler.finish_group(), demands, strict=True):
            slot, move = self.layouts.make_way(demand)
            if move is not None:
                self.rows[move.target] = self.rows.pop(move.source)
            self.layouts.admit(demand, slot)
            row.enter_slot(slot)
            self.rows[slot] = row

    def _step(self) -> None:
        self.layouts.before_step()
        self.layouts.after_step()
        for slot, row in list(self.rows.items()):
            row.start_step()
            row.generated.append(1)
            if row.status is Status.LAST_TOKEN:
                self.scheduler.note_completed(len(row.generated))
                self.layouts.release(slot)
                del self.rows[slot]


def mixed(rng: random.Random, rows: int) -> list[Lengths]:
    """Prompts around 128 tokens (8 to 1,024), answers around 48 (4 to 256)."""
    lengths = [lognormal(rng, 128, 1.0, 8, 1024) for _ in range(rows)]
    return [(length, lognormal(rng, 48, 0.8, 4, 256)) for length in lengths]


def few_shot(rng: random.Random, rows: int) -> list[Lengths]:
    """Prompts of 500 to 700 tokens, and answers of 16."""
    return [(rng.randint(500, 700), 16) for _ in range(rows)]


def long_prompts(rng: random.Random, rows: int) -> list[Lengths]:
    """Prompts of 1,200 to 1,450 tokens, which fill a chunk alone, and answers of up to 128."""
    return [(rng.randint(1200, 1450), lognormal(rng, 90, 0.5, 8, 128)) for _ in range(rows)]


BATCHES: dict[str, Callable[[random.Random, int], list[Lengths]]] = {
    "mixed": mixed,
    "few-shot": few_shot,
    "long prompts": long_prompts,
}


def in_planned_order(batch: Sequence[Lengths]) -> list[Lengths]:
    """As the planner orders rows without a common prefix: those with most work first."""
    return sorted(batch, key=lambda row: -(row[0] + TOKENS_PER_GENERATED * row[1]))


def measure(name: str, rows: int, seed: int, num_slots: int, *, planned: bool = True) -> Counted:
    """What one batch of this kind takes."""
    batch = BATCHES[name](random.Random(seed), rows)
    ordered = in_planned_order(batch) if planned else batch
    return Replay(num_slots).run(ordered, AHEAD * num_slots)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--step", type=float, default=Times.step, help="ms of a decode step")
    parser.add_argument("--chunk", type=float, default=Times.chunk, help="ms of a chunk besides")
    parser.add_argument("--token", type=float, default=Times.token, help="ms of a prompt token")
    parser.add_argument("--seeds", type=int, default=6, help="batches of each kind and size")
    parser.add_argument("--quick", action="store_true", help="256 rows, two seeds")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    args = parser.parse_args()
    times = Times(args.step, args.chunk, args.token)
    seeds, sizes = (2, (256,)) if args.quick else (args.seeds, (256, 1024, 4096))
    figures = []
    heads = f"{'steps':>8}{'least':>8}{'chunks':>8}{'pads':>7}{'seconds':>9}{'share':>7}"
    print(f"{'':<38}{heads}")
    for name in BATCHES:
        for rows in sizes:
            for planned in (True, False):
                found = [
                    measure(name, rows, seed, args.slots, planned=planned)
                    for seed in range(1, 1 + seeds)
                ]
                figures += [asdict(one) | {"batch": name, "planned": planned} for one in found]
                label = f"{name}, {rows:,} rows, {'planned' if planned else 'as they came'}"
                print(f"{label:<38}{line_of(found, times)}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", "utf-8")
    return 0


def line_of(found: Sequence[Counted], times: Times) -> str:
    """Means of some batches."""

    def mean(of: Callable[[Counted], float]) -> float:
        return sum(map(of, found)) / len(found)

    return (
        f"{mean(lambda one: one.steps):>8,.0f}{mean(lambda one: one.least_steps):>8,.0f}"
        f"{mean(lambda one: one.chunks):>8,.0f}"
        f"{mean(lambda one: one.pads / (one.pads + one.tokens)):>7.0%}"
        f"{mean(lambda one: one.seconds(times)):>9.1f}{mean(lambda one: one.share(times)):>7.3f}"
    )


if __name__ == "__main__":
    sys.exit(main())
