"""When to take more jobs from the queue, and how many.

A job that has cost several workers may be the one that kills them: it runs alone, so that those
beside it do not die with it again and again until they are failed too.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from batchkv_producer.transitions import Ending, Pulled
from batchkv_worker.engine_thread import EngineThread
from batchkv_worker.flights import Flights
from batchkv_worker.redis_side import RedisSide

IDLE_WAIT_SECONDS = 1  # how long the server holds our question while the queue is empty
EMPTY_QUEUE_SECONDS = 0.1  # how soon to ask again while rows are decoding
SUSPECT_DEATHS = 2  # from here on a job runs alone; one death may be a closed lid
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
    ) -> None:
        self._side = side
        self._engine = engine
        self._flights = flights
        self._endings = endings
        self._limits = limits
        self._prefetch = prefetch
        self.is_open = False  # the engine is ready, RQ is not suspended, nobody asked to stop
        self.is_exhausted = False  # the last pull found nothing
        self.num_taken = 0
        self.next_pull = 0.0
        self._one_by_one = False  # suspects stand at the head of the queue
        self._idle_since: float | None = None

    def wants_jobs(self) -> bool:
        """Whether to pull now or at ``next_pull``.

        Not for every single row that ends: half of what waits in the engine may run out first, so
        that a round trip brings several jobs.
        """
        free = self._engine.max_in_flight - len(self._flights)
        few = min(self._prefetch, self._engine.max_in_flight) // 2
        return self._room() > 0 and (not self._flights or free >= few)

    def refill(self) -> None:
        """Pull what there is room for. Rows that cannot be run at all are added to the endings.

        What was pulled is in the flights before Redis is asked anything else: should that fail,
        nothing is forgotten.
        """
        room = self._room()
        if not self._flights and not self._limits.burst and self.is_exhausted:
            self._idle()
            if not self._side.wait_for_job(IDLE_WAIT_SECONDS):
                return
        pulled = self._side.pull(room)
        now = time.monotonic()
        self.is_exhausted = not pulled
        if not pulled:
            self.next_pull = now + (EMPTY_QUEUE_SECONDS if self._flights else BEATEN_SECONDS)
            return
        self.next_pull = now + EMPTY_QUEUE_SECONDS if len(pulled) < room else 0.0
        suspects = [job for job in pulled if job.num_deaths >= SUSPECT_DEATHS]
        self._one_by_one = bool(suspects)
        if len(pulled) > 1 or self._flights:
            pulled = [job for job in pulled if job not in suspects]
        else:
            suspects = []  # alone: it may run
        self._admit(pulled)
        if suspects:
            self._side.give_back([job.lease for job in suspects], died=False)
        if self._flights:
            self._idle_since = None
            self._side.set_state("busy")

    def _admit(self, pulled: list[Pulled]) -> None:
        self.num_taken += len(pulled)
        works = []
        for job in pulled:
            item = self._flights.admit(job)
            if isinstance(item, Ending):
                self._endings.append(item)
            else:
                works.append(item)
        self._engine.add(works)

    def suspend(self) -> None:
        """RQ is suspended and nothing is in flight."""
        self._idle_since = None
        self.is_exhausted = True
        self._side.set_state("suspended")

    def is_spent(self) -> bool:
        """Whether the limits say that a worker with nothing in flight may end."""
        limits = self._limits
        if limits.max_jobs is not None and self.num_taken >= limits.max_jobs:
            return True
        if limits.burst and self.is_exhausted:
            return True
        if limits.max_idle_seconds is None or self._idle_since is None:
            return False
        return time.monotonic() - self._idle_since >= limits.max_idle_seconds

    def _room(self) -> int:
        if not self.is_open:
            return 0
        room = self._engine.max_in_flight - len(self._flights)
        if self._one_by_one:
            room = 0 if self._flights else 1
        if self._limits.max_jobs is not None:
            room = min(room, self._limits.max_jobs - self.num_taken)
        return max(0, room)

    def _idle(self) -> None:
        if self._idle_since is None:
            self._idle_since = time.monotonic()
        self._side.set_state("idle")
