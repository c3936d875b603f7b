"""Between the queue and the engine: takes runs of jobs, hands them over, gives some back.

``dispatch`` says how many; here it is done. Jobs that the engine has no room for yet wait in the
flights' backlog, leased and renewed like all others.

Rows that a worker had begun when it died are *suspects*: one of them may have killed it. Those of
one death run together, apart from all others (``lua/suspects.lua``). A worker that holds nothing
takes what comes first, and of suspects their group, and nothing beside it until all of it has
ended. A worker that holds rows passes suspects by and takes what stands behind them: most likely
one that holds nothing will come, such as the one that is started in place of the dead one. If none
has come within ``APART_PATIENCE_SECONDS``, one worker takes no more until it holds nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from batchkv_producer.wire.transitions import Ending, Held, Run
from batchkv_worker.engine.thread import EngineThread
from batchkv_worker.queue import dispatch
from batchkv_worker.queue.background import Beside
from batchkv_worker.queue.in_flight import Flights
from batchkv_worker.queue.passed_over import Passing
from batchkv_worker.queue.redis_side import Poll, RedisSide

IDLE_WAIT_SECONDS = 1  # how long the server holds our question while the queue is empty
EMPTY_QUEUE_SECONDS = 0.1  # how soon to ask again while rows are decoding
APART_PATIENCE_SECONDS = 60.0  # how long suspects wait for a worker that holds nothing
PASSED_SECONDS = 1.0  # how soon to ask again when nothing but suspects waits
BEATEN_SECONDS = 0.05  # how soon to ask again when another worker was faster


@dataclass(frozen=True, slots=True)
class Limits:
    """When to end without being asked. ``max_jobs`` counts jobs taken."""

    burst: bool = False
    max_jobs: int | None = None
    max_idle_seconds: float | None = None


class Intake:
    """Fills the engine up from the queue; ``is_open`` is the session's say. Monotonic seconds."""

    def __init__(
        self,
        side: RedisSide,
        engine: EngineThread,
        flights: Flights,
        endings: list[Ending],
        limits: Limits,
        prefetch: int,
        beside: Beside,
    ) -> None:
        self._side = side
        self._engine = engine
        self._flights = flights
        self._endings = endings
        self._limits = limits
        self._prefetch = prefetch
        self._beside = beside
        self.is_open = False  # the engine is ready, RQ is not suspended, nobody asked to stop
        self.is_exhausted = False  # the last pull found nothing
        self.num_taken = 0
        self.next_pull = 0.0
        self._is_apart = False  # the last pull brought suspects
        self._is_draining = False  # no more is taken before the suspects that were passed by
        self._passed_since = math.inf  # monotonic seconds
        self._lengths: tuple[int, ...] = (0, 0, 0)  # of the queue's lists, by priority
        self._num_workers = 1
        self._passing = Passing(engine, beside)
        self._idle_since: float | None = None

    def look(self, poll: Poll) -> None:
        """What the queue looks like now; give back what is in the way of more urgent jobs, or what
        others could do, if they may be idle."""
        if self._passing.is_news(self._lengths, poll.lengths):
            self.next_pull = 0.0
        self._lengths, self._num_workers = poll.lengths, poll.num_workers
        if dispatch.must_yield(self._flights.backlog_rank, self._ours):
            self._release(self._flights.num_waiting)
            self.next_pull = 0.0
        self._release(dispatch.jobs_to_return(self._view()))
        self._recall()
        self._look_at_suspects()

    def _recall(self) -> None:
        """Ask the engine for rows that only wait in it, and that others are to do, or to go before.

        Rows that run apart stay together.
        """
        if self._is_apart:
            return
        first = next((rank for rank, length in enumerate(self._ours) if length), None)
        if first is not None and (later := self._flights.started_below(first)):
            self._engine.recall(later, len(later))
            self.next_pull = 0.0
        elif count := dispatch.jobs_to_recall(self._view()):
            self._engine.recall([lease.job_id for lease in self._flights.started], count)

    def return_recalled(self) -> None:
        """Give back what the engine has forgotten."""
        if leases := self._flights.recalled:
            self._give_back(leases)

    def _look_at_suspects(self) -> None:
        """Make room for those that have waited too long, unless others do, or took them."""
        if self._is_draining:
            if self._flights and not self._beside(self._side.is_next_suspect):
                self._end_draining()
        elif time.monotonic() - self._passed_since >= APART_PATIENCE_SECONDS:
            self._is_draining = self._beside(self._side.claim_suspects)

    def _end_draining(self) -> None:
        if self._is_draining:
            self._is_draining = False
            self._passed_since = math.inf
            self._beside(self._side.release_suspects)

    @property
    def is_outdated(self) -> bool:
        """Whether the model on the disk is another now: the worker is to be started again."""
        return self._passing.is_outdated

    @property
    def _ours(self) -> tuple[int, ...]:
        """The lengths of the queue's lists, less what is known to be for other workers."""
        return self._passing.ours(self._lengths)

    def wants_jobs(self) -> bool:
        """Whether to pull now or at ``next_pull``.

        Not for every single row that ends: half of what waits in the engine may run out first, so
        that a round trip brings several jobs. Jobs of high priority are not kept waiting for that.
        """
        view = self._view()
        few = min(view.ahead, self._engine.max_in_flight) // 2 if not self._ours[0] else 1
        return self._wanted() > 0 and (not self._flights or view.room >= few)

    def refill(self) -> None:
        """Pull what is wanted, and start what the engine has room for.

        What was pulled is in the flights before Redis is asked anything else: should that fail,
        nothing is forgotten.
        """
        self._side.return_unanswered()  # it may be all that there is to wait for
        if not self._flights and not self._limits.burst and self.is_exhausted:
            self._idle()
            self._lengths = self._side.wait_for_job(IDLE_WAIT_SECONDS)
            if not any(self._lengths):
                return
        run = self._beside(self._pull())
        now = time.monotonic()
        self._lengths = run.lengths
        self._passing.note(run)
        self.is_exhausted = not (run.jobs or run.num_passed or self._passing.may_find_more(run))
        self._is_apart = run.is_apart
        if not run.jobs:
            pause = PASSED_SECONDS if run.num_passed else EMPTY_QUEUE_SECONDS
            usual = pause if self._flights else BEATEN_SECONDS
            self.next_pull = now + self._passing.pause(run, usual)
            self._note_passed(run)
            return
        self.next_pull = 0.0 if run.num_queued else now + EMPTY_QUEUE_SECONDS
        self._flights.hold(run.jobs)
        self.num_taken += len(run.jobs)
        self.feed()
        if self._flights:
            self._idle_since = None
            self._side.set_state("busy")
        self._note_passed(run)

    def _note_passed(self, run: Run) -> None:
        if run.is_apart or not run.num_passed:
            self._passed_since = math.inf
            self._end_draining()
        elif self._passed_since == math.inf:
            self._passed_since = time.monotonic()

    def feed(self) -> None:
        """Start rows of the backlog. Those that cannot be run at all are added to the endings."""
        while count := dispatch.jobs_to_start(self._view()):
            items = self._flights.start(count)
            self._endings += [item for item in items if isinstance(item, Ending)]
            self._engine.add([item for item in items if not isinstance(item, Ending)])

    def close(self) -> None:
        """Nothing may be started: give the backlog back."""
        self._release(self._flights.num_waiting)
        self._end_draining()

    def _pull(self) -> Callable[[], Run]:
        """The question for jobs, as things stand now."""
        view = self._view()
        return partial(
            self._side.pull,
            self._wanted(),
            self._num_workers,
            num_begin=self._within_limit(max(0, view.room - view.backlog)),
            may_be_apart=not self._holds_any(),
        )

    def _holds_any(self) -> bool:
        """Whether Redis thinks that we hold rows: what has ended may not be stored yet."""
        return bool(self._flights or self._endings)

    def _release(self, count: int) -> None:
        """Give back the last of the backlog. They are ours until the server has them."""
        if count > 0:
            self._give_back(self._flights.backlog[-count:])

    def _give_back(self, leases: list[Held]) -> None:
        self._side.give_back(leases, died=False)
        for lease in leases:
            self._flights.drop(lease.job_id)
        self.num_taken -= len(leases)
        self.is_exhausted = False  # a burst does not end before somebody took them

    def suspend(self) -> None:
        """RQ is suspended and nothing is in flight."""
        self._idle_since = None
        self.is_exhausted = True
        self._side.set_state("suspended")

    def is_spent(self) -> bool:
        """Whether a worker with nothing in flight may end."""
        limits = self._limits
        if self.is_outdated:
            return True
        if limits.max_jobs is not None and self.num_taken >= limits.max_jobs:
            return True
        if limits.burst and self.is_exhausted:
            return True
        if limits.max_idle_seconds is None or self._idle_since is None:
            return False
        return time.monotonic() - self._idle_since >= limits.max_idle_seconds

    def _view(self) -> dispatch.View:
        return dispatch.View(
            slots=self._engine.max_in_flight - self._prefetch,
            prefetch=self._prefetch,
            num_started=self._flights.num_started,
            backlog=self._flights.num_waiting,
            queued=dispatch.queued_first(self._ours),
            num_workers=self._num_workers,
        )

    def _wanted(self) -> int:
        """How many jobs to ask for now, 0 for not to ask."""
        if not self.is_open:
            return 0
        if (self._is_apart or self._is_draining) and self._holds_any():
            return 0
        return max(0, self._within_limit(dispatch.jobs_to_take(self._view())))

    def _within_limit(self, count: int) -> int:
        most = self._limits.max_jobs
        return count if most is None else min(count, most - self.num_taken)

    def _idle(self) -> None:
        if self._idle_since is None:
            self._idle_since = time.monotonic()
        self._side.set_state("idle")
