"""Gives jobs back to the queue: those that others should do, and those that may not run here."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence

from batchkv_producer.wire.transitions import JobLease
from batchkv_worker.engine.thread import EngineThread
from batchkv_worker.queue.in_flight import InFlight
from batchkv_worker.queue.pacing import PATIENCE_SECONDS, Pacing
from batchkv_worker.queue.redis_side import RedisSide
from batchkv_worker.queue.runs import dispatch
from batchkv_worker.queue.runs.returns import Returns

log = logging.getLogger("batchkv.worker")


class GivingBack:
    """One worker's jobs on their way back. ``note_given`` is told how many went."""

    def __init__(
        self,
        side: RedisSide,
        engine: EngineThread,
        in_flight: InFlight,
        pacing: Pacing,
        note_given: Callable[[int], None],
    ) -> None:
        self._side = side
        self._engine = engine
        self._in_flight = in_flight
        self._pacing = pacing
        self._note_given = note_given
        self._not_before = 0.0  # until then, others may take what this worker handed over
        self._surplus, self._handed_over = Returns(), Returns()
        self._asked_after = -1  # so many answers to recalls the engine was asked for rows

    def may_take(self, num_started: int) -> bool:
        """Whether jobs may be taken, so soon after some went back; with so many rows started."""
        now = time.monotonic()
        is_cooling = num_started > 0 and self._surplus.is_cooling(now)
        return now >= self._not_before and not is_cooling

    def note_taken(self) -> None:
        """Jobs were taken. The others do not know it yet."""
        self._surplus.note_taken()
        self._pacing.note_change()

    def release(self, count: int) -> None:
        """Give back the last jobs of the backlog. They are held until the server has them."""
        if count > 0:
            self.give(self._in_flight.backlog[-count:])

    def give(self, leases: Sequence[JobLease]) -> None:
        """Give back jobs that the engine does not have."""
        if not leases:
            return
        self._side.give_back(leases, died=False)
        self._in_flight.note_returned(leases)
        for lease in leases:
            self._in_flight.drop(lease.job_id)
        self._pacing.note_change()
        self._note_given(len(leases))

    def return_surplus(self, view: dispatch.View) -> None:
        """Give back the end of the backlog, because others may have nothing to do."""
        now = time.monotonic()
        self._surplus.look(now, has_surplus=view.surplus_jobs > 0)
        if (view.queued or self._surplus.is_sure(now)) and (count := dispatch.jobs_to_return(view)):
            self._return_for_good(self._in_flight.backlog[-count:])

    def recall_surplus(self, view: dispatch.View) -> None:
        """Ask the engine for rows that only wait in it, because others may have nothing to do.

        Once until it has answered: else each look in a long step would ask for as many again.
        """
        num_answers = self._in_flight.num_recalls
        if num_answers == self._asked_after or not self._surplus.is_sure(time.monotonic()):
            return
        if count := dispatch.jobs_to_recall(view):
            self._engine.recall([lease.job_id for lease in self._in_flight.started], count)
            self._asked_after = num_answers

    def return_recalled(self) -> None:
        """Give back the rows that the engine has let go."""
        self._return_for_good(self._in_flight.recalled)

    def _return_for_good(self, leases: Sequence[JobLease]) -> None:
        """Give jobs back that others should do."""
        if leases:
            self._surplus.note(leases, time.monotonic())
            self.give(leases)

    def hand_over(self, view: dispatch.View) -> None:
        """Give the last rows of the queue to faster workers that have nothing left to do.

        Each row goes once. If it comes back, nobody else wants it.
        """
        count = dispatch.rows_to_hand_over(view)
        if not count:
            return
        fresh = self._handed_over.fresh(self._in_flight.started)
        most = math.floor(count / self._in_flight.choices)
        if leases := fresh[max(0, len(fresh) - most) :]:
            now = time.monotonic()
            self._not_before = now + PATIENCE_SECONDS
            self._handed_over.note(leases, now)
            self._return_begun(leases)

    def return_started(self) -> None:
        """Give back the rows that the engine has, and cancel them there. No death is counted."""
        self._return_begun(self._in_flight.started)

    def _return_begun(self, leases: Sequence[JobLease]) -> None:
        if not leases:
            return
        self.give(leases)
        for lease in leases:
            self._engine.cancel(lease.job_id)
        log.info("gave %d started jobs back to the queue", len(leases))
