"""What the order of the queue and the size of runs do to cache hits: a production trace, simulated.

    python tests/benchmarks/bench_plan.py [--quick] [--json FILE]

The trace is `kimi_conversation_trace.jsonl` in BATCHKV_DATA (default ../shared/data beside the
checkout); without it nothing is run. It has no text but ids of 512-token blocks, so each id stands
for a text of its own here, and the real planner orders real requests. Eight workers of unequal
speed take jobs by the real dispatcher, compute prompts one after the other, hold each row in a slot
until its answer is out, and keep 500 blocks each, by the order of the real
`uses.EvictionOrder`, from what the planner says of each row and from the rows that wait in the
engine. A local hit is a block at a prompt's beginning that its worker has; the ceiling is what one
endless memory would hit. The last rows have a store that all workers share besides, under different
rules of what is written there ("shared" is the shipped one), and memories that forget by last use
alone. --quick takes every fourth conversation. Exit code 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count, takewhile
from pathlib import Path

from batchkv_cache_store.uses import EvictionOrder
from batchkv_producer.intake.formats import Row
from batchkv_producer.order.planner import BatchPlan
from batchkv_producer.wire.job import Request, SamplingParams
from batchkv_worker.engine.tokens.prompts import SHARED_SLACK
from batchkv_worker.queue.dispatch import (
    View,
    jobs_to_recall,
    jobs_to_return,
    jobs_to_start,
    jobs_to_take,
)
from batchkv_worker.settings import WAVES_AHEAD

DATA = Path(os.environ.get("BATCHKV_DATA", Path(__file__).parents[3] / "shared" / "data"))
TRACE = "kimi_conversation_trace.jsonl"

SPEEDS = (1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2)  # of the workers, against the fastest
BLOCK_TOKENS = 512
BLOCK_BYTES = 4 * BLOCK_TOKENS  # of text
MEMORY_BLOCKS = 500
SLOTS, PREFETCH = 32, WAVES_AHEAD * 32  # a worker's defaults
PROMPT_TOKENS_PER_SECOND, ANSWER_TOKENS_PER_SECOND = 2_000.0, 30.0  # of a row, at speed 1
POLL_SECONDS = 1.0
MIN_HIT_RATE, MAX_WRITTEN = 0.362, 0.30

Chain = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt as ids of its blocks, and its lengths in tokens; blocks that others begin with."""

    chain: Chain
    num_prompt: int
    num_answer: int
    num_shared: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Rates are shares of all blocks, ``written`` one of the blocks that differ."""

    local: float
    store: float
    written: float
    seconds: float
    idle: float  # share of the workers' time that was lost because the others were not done

    @property
    def total(self) -> float:
        return self.local + self.store


def read_trace(path: Path) -> list[Job]:
    """The jobs in the order of their arrival."""
    with path.open("rb") as file:
        rows = [json.loads(line) for line in file]
    return [Job(tuple(r["hash_ids"]), r["input_length"], r["output_length"]) for r in rows]


def ceiling(jobs: Sequence[Job]) -> float:
    """The share of blocks that were there before, anywhere."""
    unique = {block for job in jobs for block in job.chain}
    return 1 - len(unique) / sum(len(job.chain) for job in jobs)


def prefix_order(jobs: Sequence[Job]) -> list[Job]:
    """The jobs as the planner queues them."""

    def row(line: int, job: Job) -> Row:
        params = SamplingParams(max_tokens=max(1, job.num_answer))
        prompt = "".join(f"{block:<8}" * (BLOCK_BYTES // 8) for block in job.chain)
        return Row(line, Request(f"{line}", "completion", prompt=prompt, params=params))

    with BatchPlan(SamplingParams()) as plan:
        plan.add(row(line, job) for line, job in enumerate(jobs, 1))
        plan.seal()
        return [
            replace(jobs[line - 1], num_shared=_shared_blocks(shared_bytes))
            for chunk in plan.chunks()
            for line, _, shared_bytes in chunk.jobs
        ]


def _shared_blocks(num_bytes: int) -> int:
    """As a worker counts them (``requests``), with a tokenizer of four bytes to a token."""
    return (num_bytes // (BLOCK_BYTES // BLOCK_TOKENS) + SHARED_SLACK) // BLOCK_TOKENS


Write = Callable[["Worker", Job, int, set[int]], Iterable[int]]


def _shared(worker: Worker, job: Job, start: int, seen: set[int]) -> Iterable[int]:
    """The shipped rule."""
    return job.chain[start : worker.kept.num_worth_writing(job.chain, job.num_shared)]


WRITES: dict[str, Write] = {
    "nothing": lambda worker, job, start, seen: (),
    "all": lambda worker, job, start, seen: job.chain[start:],
    "second touch": lambda worker, job, start, seen: seen.intersection(job.chain[start:]),
    "shared": _shared,
}  # what of a prompt's blocks, computed from number ``start`` on, goes to the store


def by_runs(length: int) -> Callable[[View], int]:
    """A dispatcher that takes so many jobs whenever it has none left to start."""
    return lambda view: length if view.room > view.backlog == 0 else 0


@dataclass(slots=True)
class Worker:
    """One worker: what it holds, its memory, and when it is done with the prompts it has begun."""

    speed: float
    memory_blocks: int
    knows: bool = True  # else it forgets by last use alone
    kept: EvictionOrder[int] = field(default_factory=EvictionOrder)
    backlog: deque[Job] = field(default_factory=deque)
    engine: deque[Job] = field(default_factory=deque)
    num_decoding: int = 0
    prompts_until: float = 0.0
    last_end: float = 0.0
    queued: int = 0

    def await_row(self, job: Job) -> None:
        """A row waits in the engine: its prompt is tokenized."""
        self.engine.append(job)
        if self.knows:
            self.kept.add(job.chain)

    def next_row(self) -> Job:
        """The row whose prompt is computed now."""
        job = self.engine.popleft()
        if self.knows:
            self.kept.remove(job.chain)
        return job

    def last_row(self) -> Job:
        """The row that would be computed last: the engine forgets it."""
        job = self.engine.pop()
        if self.knows:
            self.kept.remove(job.chain)
        return job

    def keep(self, job: Job) -> None:
        """Its prompt is computed. As ``PrefixCache`` does."""
        self.kept.touch(job.chain)
        if self.knows and job.num_shared is not None:
            self.kept.demote(job.chain[job.num_shared :])
        while self.kept.num_kept > self.memory_blocks:
            self.kept.pop()


class Simulation:
    """A queue, workers that refill as they go, and a store that they may share."""

    def __init__(
        self,
        order: Sequence[Job],
        take: Callable[[View], int] = jobs_to_take,
        write: Write = WRITES["nothing"],
        *,
        speeds: Sequence[float] = SPEEDS,
        memory_blocks: int = MEMORY_BLOCKS,
        slots: int = SLOTS,
        prefetch: int = PREFETCH,
        is_dealt: bool = False,
        knows: bool = True,
    ) -> None:
        self._order, self._take, self._write = order, take, write
        self._slots, self._prefetch = slots, prefetch
        self._queue = deque(order)
        self._workers = [Worker(speed, memory_blocks, knows) for speed in speeds]
        self._events: list[tuple[float, int, Worker, bool]] = []
        self._numbers = count()  # events of one moment keep their order
        self._store: set[int] = set()
        self._seen: set[int] = set()
        self._num_local = self._num_store = 0
        if is_dealt:
            for index, worker in enumerate(self._workers):
                worker.backlog.extend(order[index :: len(speeds)])
            self._queue.clear()

    def run(self) -> Outcome:
        """Until every job has its answer."""
        for worker in self._workers:
            self._push(0.0, worker, ends=False)
        num_open, now = len(self._order), 0.0
        while num_open:
            now, _, worker, ends = heapq.heappop(self._events)
            if ends:
                worker.num_decoding -= 1
                worker.last_end = now
                num_open -= 1
            else:
                self._poll(worker)
                self._push(now + POLL_SECONDS, worker, ends=False)
            self._refill(worker)
            self._compute(worker, now)
        blocks = [block for job in self._order for block in job.chain]
        lost = sum(now - worker.last_end for worker in self._workers)
        return Outcome(
            local=self._num_local / len(blocks),
            store=self._num_store / len(blocks),
            written=len(self._store) / len(set(blocks)),
            seconds=now,
            idle=lost / now / len(self._workers),
        )

    def _push(self, at: float, worker: Worker, *, ends: bool) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), worker, ends))

    def _view(self, worker: Worker) -> View:
        num_started, backlog = worker.num_decoding + len(worker.engine), len(worker.backlog)
        limits, num_workers = (self._slots, self._prefetch), len(self._workers)
        return View(*limits, num_started, backlog, worker.queued, num_workers)

    def _poll(self, worker: Worker) -> None:
        worker.queued = len(self._queue)
        if self._take is jobs_to_take:
            for _ in range(jobs_to_return(self._view(worker))):
                self._queue.appendleft(worker.backlog.pop())
            for _ in range(jobs_to_recall(self._view(worker))):
                self._queue.appendleft(worker.last_row())

    def _refill(self, worker: Worker) -> None:
        """As ``JobPuller`` does, which does not ask for every single row that ends."""
        view = self._view(worker)
        if self._queue and (view.num_started == 0 or view.room >= view.ahead // 2):
            number = min(self._take(view), len(self._queue))
            worker.backlog.extend(self._queue.popleft() for _ in range(number))
            worker.queued = len(self._queue)
        for _ in range(jobs_to_start(self._view(worker))):
            worker.await_row(worker.backlog.popleft())

    def _compute(self, worker: Worker, now: float) -> None:
        """Prompts of rows for which there is a slot, one after the other."""
        while worker.engine and worker.num_decoding < self._slots:
            job = worker.next_row()
            num_local = worker.kept.num_held(job.chain)
            rest = job.chain[num_local:]
            is_held = (block in self._store or worker.kept.has(block) for block in rest)
            num_held = num_local + sum(1 for _ in takewhile(bool, is_held))
            self._num_local += num_local
            self._num_store += num_held - num_local
            self._store.update(self._write(worker, job, num_held, self._seen))
            self._seen.update(job.chain[num_held:])
            worker.keep(job)
            num_tokens = max(1, job.num_prompt - num_held * BLOCK_TOKENS)
            prompt_seconds = num_tokens / PROMPT_TOKENS_PER_SECOND / worker.speed
            answer_seconds = job.num_answer / ANSWER_TOKENS_PER_SECOND / worker.speed
            worker.prompts_until = max(now, worker.prompts_until) + prompt_seconds
            worker.num_decoding += 1
            self._push(worker.prompts_until + answer_seconds, worker, ends=True)


def measure(jobs: Sequence[Job]) -> dict[str, Outcome]:
    """Every order and dispatcher, then the shipped ones with every rule of what is written."""
    order = prefix_order(jobs)
    outcomes = {"arrival order, runs of 1": Simulation(jobs, by_runs(1)).run()}
    outcomes["prefix order, round robin"] = Simulation(order, by_runs(1), is_dealt=True).run()
    for length in (1, 16, 64, 128):
        outcomes[f"prefix order, runs of {length}"] = Simulation(order, by_runs(length)).run()
    outcomes["prefix order, shipped"] = Simulation(order).run()
    for memory_blocks in (MEMORY_BLOCKS, 60):
        for name in ("all", "second touch", "shared"):
            simulation = Simulation(order, write=WRITES[name], memory_blocks=memory_blocks)
            outcomes[f"{memory_blocks} blocks, store: {name}"] = simulation.run()
        simulation = Simulation(order, memory_blocks=memory_blocks, knows=False)
        outcomes[f"{memory_blocks} blocks, by last use"] = simulation.run()
    return outcomes


def report(best: float, outcomes: dict[str, Outcome]) -> None:
    """The table."""
    print(f"{'':<34}{'local':>7}{'store':>7}{'total':>7}{'written':>9}{'seconds':>9}{'idle':>6}")
    for name, got in outcomes.items():
        rates = f"{got.local:>7.1%}{got.store:>7.1%}{got.total:>7.1%}{got.written:>9.1%}"
        print(f"{name:<34}{rates}{got.seconds:>9,.0f}{got.idle:>6.0%}")
    print(f"{'ceiling':<34}{best:>21.1%}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="every fourth conversation")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    arguments = parser.parse_args()
    path = DATA / TRACE
    if not path.exists():
        print(f"{path} is not there: nothing to run (set BATCHKV_DATA)")
        return 0
    jobs = read_trace(path)
    if arguments.quick:
        jobs = [job for job in jobs if job.chain[min(1, len(job.chain) - 1)] % 4 == 0]
    best = ceiling(jobs)
    outcomes = measure(jobs)
    print(f"{len(jobs):,} jobs")
    report(best, outcomes)
    if arguments.json:
        figures = {"ceiling": best} | {name: asdict(got) for name, got in outcomes.items()}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", "utf-8")
    if arguments.quick:
        return 0  # the targets are those of the whole trace
    shipped = outcomes[f"{MEMORY_BLOCKS} blocks, store: shared"]
    is_met = shipped.local >= MIN_HIT_RATE and shipped.written <= MAX_WRITTEN
    goal = f"local >= {MIN_HIT_RATE:.1%}, written <= {MAX_WRITTEN:.0%}"
    print(f"target {goal}: {'met' if is_met else 'MISSED'}")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
