"""Between the queue and the engine: pulls runs of jobs, hands rows over, gives some jobs back.

``dispatch`` decides how many. Jobs that the engine has no room for yet wait in the backlog.

Rows that had begun on a worker when it died are *suspects*: one of them may have killed it. The
rows of one death run together, and with no others (``lua/suspects.lua``). A worker that holds no
job takes the first job in the queue. If that is a suspect, it takes the suspect's group, and no
other job until the whole group has ended. A worker that holds jobs passes suspects over and takes
the jobs after them. Most likely a worker that holds none will come: one replaces the dead one.
If none has come within ``APART_WAIT_SECONDS``, one worker takes no more until it holds none.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from batchkv_producer.wire.transitions import Run
from batchkv_worker.engine.thread import EngineThread
from batchkv_worker.queue.background import ServeEngineUntil
from batchkv_worker.queue.giving_back import GivingBack
from batchkv_worker.queue.model_watch import ModelWatch
from batchkv_worker.queue.pacing import Pacing
from batchkv_worker.queue.redis_side import Poll, RedisSide
from batchkv_worker.queue.runs import dispatch
from batchkv_worker.queue.runs.passed_over import PassedOver
from batchkv_worker.queue.runs.queue_turns import QueueTurns
from batchkv_worker.queue.state import WorkerState

log = logging.getLogger("batchkv.worker")

IDLE_WAIT_SECONDS = 1.0  # how long a blocking call waits on the server while the queue is empty
# The same at first. A signal is heeded only after the call, and a run whose batch is done stops its
# workers at once.
FIRST_WAIT_SECONDS, FIRST_SECONDS = 0.1, 2.0
EMPTY_QUEUE_SECONDS = 0.1  # how soon to ask again while rows are decoding
APART_WAIT_SECONDS = 60.0  # how long suspects wait for a worker that holds nothing
PASSED_SECONDS = 1.0  # how soon to ask again when nothing but suspects waits
RUN_OUT_PART = 4  # one part in so many of the rows ahead runs out before the next pull
BEATEN_SECONDS = 0.05  # how soon to ask again when another worker was faster


@dataclass(frozen=True, slots=True)
class Limits:
    """When to end without a signal. ``max_jobs`` counts jobs taken."""

    burst: bool = False
    max_jobs: int | None = None
    max_idle_seconds: float | None = None


class JobPuller:
    """Keeps the engine filled from the queue. Times are monotonic seconds."""

    def __init__(
        self,
        side: RedisSide,
        engine: EngineThread,
        state: WorkerState,
        limits: Limits,
        serve_engine_until: ServeEngineUntil,
        queues: Sequence[str],
    ) -> None:
        self._side = side
        self._engine = engine
        self._state = state
        self._in_flight = state.in_flight
        self._limits = limits
        self._serve_engine_until = serve_engine_until
        self._turns = QueueTurns(queues)
        self.is_exhausted = False  # the last pull found nothing
        self.num_taken = 0
        self._next_pull = 0.0
        self._is_apart = False  # the last pull brought suspects
        self._is_draining = False  # no job is taken before the suspects that were passed over
        self._passed_since = math.inf
        self._lengths: tuple[int, ...] = (0, 0, 0)  # of the queue's lists, by priority
        self._num_workers = 1
        self.pacing = Pacing(side.worker, engine, state.in_flight)
        self.giving = GivingBack(side, engine, state.in_flight, self.pacing, self._note_given)
        self._passed_over = PassedOver()
        self._model_watch = ModelWatch()
        self._idle_since: float | None = None

    def note_poll(self, poll: Poll) -> None:
        """Give back jobs when more urgent ones wait, or when other workers may be idle."""
        if self._passed_over.is_news(self._lengths, poll.lengths):
            self.pull_now()
        self._lengths, self._num_workers = poll.lengths, poll.num_workers
        self.pacing.note_told(poll.paces, poll.workers)
        if dispatch.must_yield(self._in_flight.backlog_rank, self._ours):
            self.giving.release(self._in_flight.num_waiting)
            self.pull_now()
        self.giving.return_surplus(self._view())
        self._recall()
        if not self._is_apart:
            self.giving.hand_over(self._view())
        self._note_left()
        if self._num_workers > 1:
            self.pacing.note_seconds_left(self._view().seconds_left)
        self._check_suspects()

    @property
    def is_away(self) -> bool:
        """Whether other workers should leave no jobs to this one, whatever it holds."""
        if not self._state.may_start or self._state.next_queue or self._within_limit(1) < 1:
            return True
        return self._waits_apart or self._passed_over.is_barren(self._lengths, time.monotonic())

    def _note_left(self) -> None:
        """Notice how long jobs are left to others, and the end of the queue."""
        is_ready = self._state.may_start and not self._state.next_queue
        view = self._view()
        is_left = is_ready and not self._wanted(view)
        is_idle = is_left and not self._in_flight
        could_take = view.crowd.has_free_slots or view.crowd.num_silent > 0
        is_waiting = is_left and view.free_slots > 0 and could_take
        self.pacing.note_queued(view.queued, is_left=is_waiting)
        if is_idle and not view.queued:
            self.is_exhausted = True  # as a pull would have found

    @property
    def _waits_apart(self) -> bool:
        """Whether no jobs are taken because of suspects."""
        return (self._is_apart or self._is_draining) and self._state.holds_jobs

    def _recall(self) -> None:
        """Ask the engine for rows that only wait in it: others are more urgent, or others are idle.

        Rows that run apart stay together.
        """
        if self._is_apart:
            return
        first = next((rank for rank, length in enumerate(self._ours) if length), None)
        if first is not None and (later := self._in_flight.started_below(first)):
            self._engine.recall(later, self._in_flight.num_started)
            self.pull_now()
        else:
            self.giving.recall_surplus(self._view())

    def look_at_queues(self) -> None:
        """If another queue has its turn, pull no more from this one.

        Rows of this queue that are held come to their end, unless the other's are more urgent. Then
        all that have not begun go back.
        """
        if not self._turns.are_several or self._is_draining or not self._state.may_start:
            return
        heads = self._serve_engine_until(partial(self._side.heads, self._turns.queues))
        chosen = self._turns.choose(heads, time.monotonic())
        self._state.next_queue = chosen if chosen != self._turns.current else ""
        if not self._state.next_queue:
            return
        rank = heads[chosen].rank
        if self._in_flight.backlog_rank > rank:
            self.giving.release(self._in_flight.num_waiting)
        if not self._is_apart and (later := self._in_flight.started_below(rank)):
            self._engine.recall(later, len(later))

    def switch(self) -> None:
        """The engine serves the next queue from now on: forget what was known of the former one."""
        self._turns.current, self._state.next_queue = self._state.next_queue, ""
        self._side.serve(self._turns.current)
        self.is_exhausted = self._is_apart = False
        self._passed_since = math.inf
        self._lengths = (0, 0, 0)
        self._passed_over = PassedOver()
        self._idle_since = None
        self.pacing.forget()
        self.pull_now()

    def _check_suspects(self) -> None:
        """Make room for suspects that have waited too long, unless another worker does."""
        if self._is_draining:
            if self._in_flight and not self._serve_engine_until(self._side.is_next_suspect):
                self._end_draining()
        elif time.monotonic() - self._passed_since >= APART_WAIT_SECONDS:
            self._is_draining = self._serve_engine_until(self._side.claim_suspects)

    def _end_draining(self) -> None:
        if self._is_draining:
            self._is_draining = False
            self._passed_since = math.inf
            self._serve_engine_until(self._side.release_suspects)

    @property
    def _ours(self) -> tuple[int, ...]:
        """The lengths of the queue's lists, less the jobs that are known to be for others."""
        return self._passed_over.ours(self._lengths)

    def pull_at(self) -> float:
        """When to pull jobs, or to wait for some; infinity when none are wanted."""
        return self._next_pull if self.wants_jobs() or self._is_idle else math.inf

    @property
    def _is_idle(self) -> bool:
        """Whether nothing is held and the queue was empty when last looked at."""
        may_wait = self._state.may_start and not self._state.next_queue and not self._waits_apart
        return may_wait and self.is_exhausted and not (self._in_flight or self._limits.burst)

    def pull_now(self) -> None:
        """Pull without a pause: something has changed."""
        self._next_pull = 0.0

    def wants_jobs(self) -> bool:
        """Whether to pull, now or after a pause.

        Not for every single row that ends: some of those that wait in the engine may run out first,
        so that a round trip brings several jobs. The others last until the new ones are prepared,
        also if the rows of all slots end at once. Jobs of high priority do not wait for that.
        """
        if not self._may_take:
            return False
        view = self._view()
        ahead = min(view.ahead, self._engine.max_in_flight)
        few = ahead // RUN_OUT_PART if not self._ours[0] else 1
        return (not self._in_flight or view.room >= few) and self._wanted(view) > 0

    def refill(self) -> None:
        """Pull jobs, and start as many rows as the engine has room for.

        Pulled jobs are in flight before Redis is asked anything else, so that none is forgotten.
        """
        self._side.return_unanswered()  # it may be all that there is to wait for
        self.look_at_queues()
        if self._state.next_queue:
            return
        if self._is_idle:
            self._lengths = self._side.wait_for_job(self._idle())
            if not any(self._lengths):
                return
        view = self._view()
        if not (count := self._wanted(view)):  # it leaves them to faster workers
            self.is_exhausted, self._idle_since = False, None
            self._next_pull = time.monotonic() + EMPTY_QUEUE_SECONDS
            return
        run = self._serve_engine_until(self._pull(view, count))
        now = time.monotonic()
        self._lengths = run.lengths
        self._in_flight.note_reused(run.num_reused)
        self._passed_over.note(run)
        self._passed_over.note_barren(run, now)
        self._turns.note_pull(has_jobs=bool(run.jobs), has_entries=any(run.lengths), now=now)
        may_find_more = self._passed_over.may_find_more(run)
        self.is_exhausted = not (run.jobs or run.num_passed or may_find_more)
        self._is_apart = run.is_apart
        if not run.jobs:
            self._next_pull = now + self._pause(run)
            self._note_passed(run)
            self.look_at_queues()  # a burst ends only when no queue has jobs for this worker
            return
        self._next_pull = 0.0 if run.num_queued else now + EMPTY_QUEUE_SECONDS
        self._in_flight.hold(run.jobs)
        self.giving.note_taken()
        self.num_taken += len(run.jobs)
        if not self._state.is_resting:
            self.feed(view.room)
            self.giving.give(self._in_flight.not_begun)
        if self._in_flight:
            self._idle_since = None
            self._side.set_state("busy")
        self._note_passed(run)

    def _pause(self, run: Run) -> float:
        """How long to wait after a pull that brought no job, in seconds."""
        usual = PASSED_SECONDS if run.num_passed else EMPTY_QUEUE_SECONDS
        if self._passed_over.are_all_others(run) and self._model_watch.is_due:
            self._model_watch.note(self._serve_engine_until(self._engine.has_changed))
            self._state.is_outdated = self._model_watch.has_changed
        return self._passed_over.pause(run, usual if self._in_flight else BEATEN_SECONDS)

    def _note_passed(self, run: Run) -> None:
        if run.is_apart or not run.num_passed:
            self._passed_since = math.inf
            self._end_draining()
        elif self._passed_since == math.inf:
            self._passed_since = time.monotonic()

    def feed(self, promised: int = 0) -> None:
        """Start rows of the backlog, at least those that were promised.

        A row that cannot run at all becomes a result.
        """
        while self._in_flight.num_waiting:
            count = dispatch.jobs_to_start(self._view(), promised)
            if not count:
                return
            works, promised = self._state.start(count), 0
            self.pacing.note_begun(works)
            self._engine.add(works)

    def close(self) -> None:
        """Nothing may be started: give the backlog back."""
        self.giving.release(self._in_flight.num_waiting)
        self._end_draining()

    def _note_given(self, num_jobs: int) -> None:
        self.num_taken -= num_jobs
        self.is_exhausted = False  # a burst does not end before another worker has taken them

    def _pull(self, view: dispatch.View, count: int) -> Callable[[], Run]:
        """The call that asks for so many jobs."""
        return partial(
            self._side.pull,
            count,
            self._num_workers,
            fewest=dispatch.fewest_to_take(view, count),
            num_begin=self._within_limit(max(0, view.jobs(view.room) - view.backlog)),
            may_be_apart=not self._state.holds_jobs,
        )

    def pause(self) -> None:
        """The worker rests and nothing is in flight. It is no end of the queue."""
        self._idle_since = None
        self._side.set_state("suspended")

    def suspend(self) -> None:
        """RQ is suspended and nothing is in flight."""
        self._idle_since = None
        self.is_exhausted = True
        self._side.set_state("suspended")

    def is_spent(self) -> bool:
        """Whether a worker with nothing in flight may end."""
        limits = self._limits
        if self._state.is_outdated:
            return True
        if limits.max_jobs is not None and self.num_taken >= limits.max_jobs:
            return True
        if self._state.next_queue:
            return False
        if limits.burst and self.is_exhausted:
            return True
        if limits.max_idle_seconds is None or self._idle_since is None:
            return False
        return time.monotonic() - self._idle_since >= limits.max_idle_seconds

    def _view(self) -> dispatch.View:
        return dispatch.View(
            slots=self._engine.num_slots,
            prefetch=self._engine.max_in_flight - self._engine.num_slots,
            num_started=self._in_flight.num_started,
            backlog=self._in_flight.num_waiting,
            queued=dispatch.queued_first(self._ours),
            num_workers=self._num_workers,
            choices=self._in_flight.choices,
            num_waiting=self.pacing.num_waiting,
            told=self.pacing.crowd(),
            job_work=self.pacing.meter.job_work,
            row_seconds=self.pacing.meter.row_seconds,
            is_patient=self.pacing.is_patient,
        )

    @property
    def _may_take(self) -> bool:
        """Whether jobs may be taken at all."""
        return self._state.may_start and not self._state.next_queue and not self._waits_apart

    def _wanted(self, view: dispatch.View) -> int:
        """How many jobs to ask for now, 0 for not to ask."""
        if not self._may_take or not self.giving.may_take(view.num_started):
            return 0
        return max(0, self._within_limit(dispatch.jobs_to_take(view)))

    def _within_limit(self, count: int) -> int:
        most = self._limits.max_jobs
        return count if most is None else min(count, most - self.num_taken)

    def _idle(self) -> float:
        """The worker has nothing to do. Returns how long it may wait for a job, in seconds."""
        now = time.monotonic()
        if self._idle_since is None:
            self._idle_since = now
        self._side.set_state("idle")
        is_new = now - self._idle_since < FIRST_SECONDS
        return FIRST_WAIT_SECONDS if is_new else IDLE_WAIT_SECONDS
