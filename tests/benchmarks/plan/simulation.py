"""Workers of unequal speed that share a queue, simulated with the real dispatcher and memory.

Each worker computes prompts one after the other. Rows then generate side by side, one in a slot,
until their answers are out. It keeps 500 blocks, by the order of the real ``uses.EvictionOrder``,
from what the planner says of each row and from the rows that wait in the engine. Its speed, the
work of its rows and what the others have told it are measured and estimated as in a real worker
(``queue.runs.pace``). It looks at the queue and at the others as often as a real one does.
"""

from __future__ import annotations

import heapq
import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from pathlib import Path
from typing import Literal

from batchkv_cache_store.uses import EvictionOrder
from batchkv_producer.intake.formats import Row
from batchkv_producer.order.planner import BatchPlan
from batchkv_producer.wire.job import Request, SamplingParams
from batchkv_worker.engine.tokens.prompts import SHARED_SLACK
from batchkv_worker.queue.pacing import (
    END_SECONDS,
    NEWS_SECONDS,
    PATIENCE_SECONDS,
    QUICK_POLL_SECONDS,
)
from batchkv_worker.queue.runs.dispatch import (
    View,
    fewest_to_take,
    jobs_to_recall,
    jobs_to_return,
    jobs_to_start,
    jobs_to_take,
    rows_to_hand_over,
)
from batchkv_worker.queue.runs.pace import Beats, Crowd, Meter, Pace, crowd_of
from batchkv_worker.queue.runs.returns import COOL_SECONDS, SETTLE_SECONDS
from batchkv_worker.queue.runs.sizes import prompt_work
from batchkv_worker.queue.session import POLL_SECONDS
from batchkv_worker.settings import WAVES_AHEAD

SPEEDS = (1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2)  # of the workers, against the fastest
BLOCK_TOKENS = 512
BLOCK_BYTES = 4 * BLOCK_TOKENS  # of text
MEMORY_BLOCKS = 500
SLOTS, PREFETCH = 32, WAVES_AHEAD * 32  # a worker's defaults
PROMPT_TOKENS_PER_SECOND, ANSWER_TOKENS_PER_SECOND = 2_000.0, 30.0  # of a row, at speed 1

Chain = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt as ids of its blocks, and its lengths in tokens; blocks that others begin with."""

    chain: Chain
    num_prompt: int
    num_answer: int
    num_shared: int | None = None
    starts: bool = True  # the first of its prefix in the queue, or it shares nothing


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
            replace(
                jobs[line - 1],
                num_shared=_shared_blocks(shared_bytes),
                starts=line in chunk.starts or not shared_bytes,
            )
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
    """One worker: what it holds, its memory, and what it knows of itself and the others."""

    name: str
    speed: float
    memory_blocks: int
    knows: bool = True  # else it forgets by last use alone
    kept: EvictionOrder[int] = field(default_factory=EvictionOrder)
    backlog: deque[Job] = field(default_factory=deque)
    engine: deque[Job] = field(default_factory=deque)
    prompts: float = 0.0  # work of both
    in_prefill: Job | None = None
    decoding: dict[int, Job] = field(default_factory=dict)  # by the number of its last event
    handed_over: set[Job] = field(default_factory=set)
    last_end: float = 0.0
    queued: int = 0
    meter: Meter = field(default_factory=Meter)
    others: Crowd = field(default_factory=Crowd)  # as they were at its last look
    looked_at: float = 0.0
    beats: Beats = field(default_factory=Beats)
    num_looks: int = 0
    computed_until: float = 0.0  # how far the meter has counted
    left: tuple[int, float] = (0, 0.0)  # jobs that it leaves to others, and since when
    is_patient: bool = True
    handed_until: float = 0.0  # it takes none, so that others take what it handed over
    surplus_since: float = math.inf
    cool_until: float = 0.0
    poll_at: float = 0.0

    @property
    def num_decoding(self) -> int:
        return len(self.decoding)

    @property
    def num_begun(self) -> int:
        return self.num_decoding + (self.in_prefill is not None)

    def take(self, job: Job) -> None:
        """A job of the queue goes into the backlog."""
        self.backlog.append(job)
        self.prompts += work_of(job)

    def last_jobs(self, count: int) -> list[Job]:
        """The last jobs of the backlog go back, the last first."""
        jobs = list(reversed(self.backlog))[:count]
        gone = set(jobs)
        self.backlog = deque(job for job in self.backlog if job not in gone)
        self.prompts -= sum(work_of(job) for job in jobs)
        return jobs

    def await_row(self, job: Job) -> None:
        """A row waits in the engine: its prompt is tokenized."""
        self.engine.append(job)
        self.meter.add_begun(work_of(job))
        if self.knows:
            self.kept.add(job.chain)

    def next_row(self) -> Job:
        """The row whose prompt is computed now."""
        job = self.engine.popleft()
        self.prompts -= work_of(job)
        if self.knows:
            self.kept.remove(job.chain)
        return job

    def last_rows(self, count: int) -> list[Job]:
        """The rows that would be computed last: the engine forgets them, and they go back."""
        jobs = list(reversed(self.engine))[:count]
        gone = set(jobs)
        self.engine = deque(job for job in self.engine if job not in gone)
        self.prompts -= sum(work_of(job) for job in jobs)
        for job in jobs if self.knows else ():
            self.kept.remove(job.chain)
        return jobs

    def keep(self, job: Job) -> None:
        """Its prompt is computed. As ``PrefixCache`` does."""
        self.kept.touch(job.chain)
        if self.knows and job.num_shared is not None:
            self.kept.demote(job.chain[job.num_shared :])
        while self.kept.num_kept > self.memory_blocks:
            self.kept.pop()

    def measure(self, now: float, slots: int) -> None:
        """Count what was computed since the last call."""
        seconds, self.computed_until = now - self.computed_until, now
        rate = self.speed * seconds
        if not self.engine and self.in_prefill is None and self.num_decoding < slots:
            return  # it is not full
        prompt = PROMPT_TOKENS_PER_SECOND * rate * (self.in_prefill is not None)
        generated = self.num_decoding * ANSWER_TOKENS_PER_SECOND * rate
        self.meter.add_computed(round(prompt), round(generated), seconds, self.num_begun)

    def pace(self, slots: int) -> Pace:
        """As ``Pacing`` makes it."""
        answer = self.meter.answer_work
        held = self.prompts + answer * (len(self.engine) + len(self.backlog))
        prompts = (self.in_prefill is not None) * (self.meter.job_work + answer) / 2
        num_free = max(0, slots - self.num_begun - len(self.engine))
        held += prompts + self.num_decoding * answer / 2
        return Pace(
            *(self.meter.speed, held),
            free_slots=num_free,
            beat=self.num_looks,
            answer=self.meter.answer,
        )


def work_of(job: Job) -> float:
    """The work of its prompt, as a worker estimates it."""
    shared = (job.num_shared or 0) * BLOCK_BYTES
    return prompt_work(job.num_prompt * (BLOCK_BYTES // BLOCK_TOKENS), shared)


Event = Literal["poll", "prompt", "end"]


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
        self._workers = [
            Worker(f"{number}", speed, memory_blocks, knows) for number, speed in enumerate(speeds)
        ]
        self._told: dict[str, str] = {}
        self._events: list[tuple[float, int, Worker, Event, Job | None]] = []
        self._numbers = count()  # events of one moment keep their order
        self._store: set[int] = set()
        self._seen: set[int] = set()
        self._num_local = self._num_store = 0
        if is_dealt:
            for index, worker in enumerate(self._workers):
                for job in order[index :: len(speeds)]:
                    worker.take(job)
            self._queue.clear()

    def run(self) -> Outcome:
        """Until every job has its answer."""
        for worker in self._workers:
            self._push(0.0, worker, "poll")
        num_open, now = len(self._order), 0.0
        while num_open:
            now, number, worker, kind, job = heapq.heappop(self._events)
            worker.measure(now, self._slots)
            if kind == "poll":
                if now < worker.poll_at:
                    continue
                self._poll(worker, now)
                self._poll_in(worker, now, self._pause(worker))
            elif job is not None and kind == "prompt" and worker.in_prefill is job:
                worker.in_prefill = None
                seconds = job.num_answer / ANSWER_TOKENS_PER_SECOND / worker.speed
                worker.decoding[self._push(now + seconds, worker, "end", job)] = job
            elif kind == "end" and (job := worker.decoding.pop(number, None)):
                worker.last_end = now
                worker.meter.add_answer(job.num_answer)
                num_open -= 1
            self._refill(worker, now)
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

    def _poll_in(self, worker: Worker, now: float, seconds: float) -> None:
        """The worker looks again in so many seconds, and no other time before."""
        worker.poll_at = now + seconds
        self._push(worker.poll_at, worker, "poll")

    def _pause(self, worker: Worker) -> float:
        """As ``JobPuller.poll_seconds`` has it."""
        view = self._view(worker)
        is_new = worker.num_begun > 0 and not worker.meter.speed
        is_quick = is_new or 0 < view.seconds_left < END_SECONDS
        return QUICK_POLL_SECONDS if is_quick else POLL_SECONDS

    def _push(self, at: float, worker: Worker, kind: Event, job: Job | None = None) -> int:
        heapq.heappush(self._events, (at, number := next(self._numbers), worker, kind, job))
        return number

    def _view(self, worker: Worker) -> View:
        others = worker.others.later(worker.computed_until - worker.looked_at)
        return View(
            *(self._slots, self._prefetch, worker.num_begun + len(worker.engine)),
            *(len(worker.backlog), worker.queued, len(self._workers)),
            num_waiting=len(worker.engine),
            told=replace(others, own=worker.pace(self._slots)),
            job_work=worker.meter.job_work,
            row_seconds=worker.meter.row_seconds,
            is_patient=worker.is_patient,
        )

    def _poll(self, worker: Worker, now: float) -> None:
        worker.queued = len(self._queue)
        worker.num_looks += 1
        self._told[worker.name] = worker.pace(self._slots).encode()
        names = (each.name for each in self._workers)
        worker.beats.note(self._told, now)
        worker.others = crowd_of(worker.name, Pace(), self._told, names, worker.beats, now)
        worker.looked_at = now
        if self._take is not jobs_to_take:
            return
        worker.meter.told_answer = worker.others.answer
        self._return(worker, now)
        if self._hand_over(worker, rows_to_hand_over(self._view(worker))):
            worker.handed_until = now + PATIENCE_SECONDS
        view = self._view(worker)
        is_waiting = not self._take(view) and view.free_slots > 0 and view.crowd.has_free_slots
        num_left = len(self._queue) if is_waiting else 0
        if num_left != worker.left[0]:
            worker.left = (num_left, now)
        worker.is_patient = not num_left or now - worker.left[1] < PATIENCE_SECONDS

    def _return(self, worker: Worker, now: float) -> None:
        """Give back what is too much, if it was for a while."""
        view = self._view(worker)
        worker.surplus_since = min(worker.surplus_since, now) if view.surplus_jobs else math.inf
        if now - worker.surplus_since < SETTLE_SECONDS:
            return
        jobs = worker.last_jobs(jobs_to_return(view)) + worker.last_rows(jobs_to_recall(view))
        self._queue.extendleft(jobs)
        if jobs:
            worker.cool_until = now + COOL_SECONDS
            self._poll_in(worker, now, NEWS_SECONDS)

    def _hand_over(self, worker: Worker, most: int) -> int:
        """Rows that were begun go back, each once. What was computed of them is lost."""
        begun = [job for job in worker.decoding.values() if job not in worker.handed_over]
        if worker.in_prefill is not None and worker.in_prefill not in worker.handed_over:
            begun.append(worker.in_prefill)
        begun = begun[max(0, len(begun) - most) :]
        for job in begun:
            worker.handed_over.add(job)
            worker.decoding = {at: one for at, one in worker.decoding.items() if one is not job}
            worker.in_prefill = None if worker.in_prefill is job else worker.in_prefill
            self._queue.appendleft(job)
        return len(begun)

    def _before_a_prefix(self, least: int, most: int) -> int:
        """As ``pull.lua`` does: so many jobs that the next one begins another prefix."""
        if least >= most or len(self._queue) <= most:
            return most
        places = range(most, least - 1, -1)
        return next((count for count in places if self._queue[count].starts), most)

    def _refill(self, worker: Worker, now: float) -> None:
        """As ``JobPuller`` does, which does not ask for every single row that ends."""
        if worker.handed_until > now:
            return
        view = self._view(worker)
        is_cooling = view.num_started > 0 and now < worker.cool_until
        has_room = view.num_started == 0 or view.room >= view.ahead // 2
        if self._queue and has_room and not is_cooling:
            count = self._take(view)
            if self._take is jobs_to_take:
                count = self._before_a_prefix(fewest_to_take(view, count), count)
            count = min(count, len(self._queue))
            for _ in range(count):
                worker.take(self._queue.popleft())
            worker.queued = len(self._queue)
            if count:
                worker.surplus_since = math.inf
                self._poll_in(worker, now, NEWS_SECONDS)
        for _ in range(jobs_to_start(self._view(worker))):
            worker.await_row(worker.backlog.popleft())

    def _compute(self, worker: Worker, now: float) -> None:
        """Begin the next prompt, if there is a slot for its row."""
        if worker.in_prefill is not None or not worker.engine:
            return
        if worker.num_decoding >= self._slots:
            return
        worker.in_prefill = job = worker.next_row()
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
        seconds = num_tokens / PROMPT_TOKENS_PER_SECOND / worker.speed
        self._push(now + seconds, worker, "prompt", job)
