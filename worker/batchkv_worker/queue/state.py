"""The state of one worker, shared by its session and its job puller. Needs no Redis, no engine.

A row is here from the moment it is pulled until Redis has its result: in the backlog or in the
engine (``InFlight``), then among ``results`` or ``canceled``, which are not stored yet. The methods
here are the only writers of those lists. ``is_ready``, ``is_suspended`` and ``engine_fault`` are
written by the session alone, ``is_outdated`` and ``next_queue`` by the job puller alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from batchkv_producer.wire.transitions import JobResult
from batchkv_worker.events import Completed, Rejected, Work
from batchkv_worker.figures.rows import RowCounts
from batchkv_worker.queue.in_flight import InFlight
from batchkv_worker.queue.pause import Drain, Pause
from batchkv_worker.queue.stop import StopRequest


class LiveRows(Protocol):
    """The rows that somebody waits for (``queue.live``). They are in none of the lists here."""

    @property
    def num_rows(self) -> int: ...

    def hold(self) -> bool: ...

    def serve(self, model: str) -> None: ...

    def close(self) -> None: ...


class NoLiveRows:
    """A worker that answers no live rows."""

    num_rows = 0

    def hold(self) -> bool:
        return True

    def serve(self, model: str) -> None:
        pass

    def close(self) -> None:
        pass


class WorkerState:
    """The rows of one worker, and whether it may start more."""

    def __init__(self, in_flight: InFlight, stop: StopRequest, pause: Pause | None = None) -> None:
        self.in_flight = in_flight
        self.stop = stop
        self.pause = pause or Pause()
        self.drain = Drain()
        self.live: LiveRows = NoLiveRows()
        self.live_counts = RowCounts()  # how live rows ended
        self.results: list[JobResult] = []  # of rows that have ended
        self.canceled: list[tuple[str, bytes]] = []  # (job id, canceled result)
        self.is_ready = False  # the engine has loaded its model
        self.is_suspended = True  # RQ's workers are suspended; assumed until the first look
        self.is_outdated = False  # the model's files are not those that were loaded
        self.next_queue = ""  # another queue has its turn as soon as nothing of this one is held
        self.engine_fault: str | None = None  # why the engine died
        self.is_device_fault = False  # it died since the device failed: no row can be the reason

    @property
    def may_start(self) -> bool:
        """Whether jobs may be pulled and started."""
        is_well = self.is_ready and self.engine_fault is None
        is_held_up = self.is_suspended or self.is_resting or self.is_outdated
        return is_well and not (is_held_up or self.stop.is_asked)

    @property
    def is_resting(self) -> bool:
        """Whether this worker takes no rows for now: it is paused or drained."""
        return self.drain.is_on or not self.pause.may_work

    @property
    def may_switch(self) -> bool:
        """Whether the engine may exchange its adapter now, because another queue has its turn."""
        return bool(self.next_queue) and self.may_start and self.is_empty

    @property
    def holds_jobs(self) -> bool:
        """Whether Redis counts any job as this worker's: results may not be stored yet."""
        return bool(self.in_flight or self.results)

    @property
    def is_empty(self) -> bool:
        """Whether no row is held, and Redis has the results of all rows that have ended."""
        return not (self.in_flight or self.results or self.canceled or self.live.num_rows)

    def most_live(self, num_slots: int) -> int:
        """How many live rows may be held: half of the slots while there are rows of batches."""
        if not self.may_start or self.next_queue:
            return 0
        return max(1, num_slots // 2) if self.in_flight else num_slots

    def start(self, count: int) -> list[Work]:
        """Take the first rows of the backlog: work for the engine. The others have failed."""
        work: list[Work] = []
        for item in self.in_flight.start(count):
            if isinstance(item, JobResult):
                self.results.append(item)
            else:
                work.append(item)
        return work

    def end(self, event: Completed | Rejected) -> None:
        """The engine reports the end of a row. A row that is not held any more is ignored."""
        result = self.in_flight.end(event)
        if result is not None:
            self.results.append(result)

    def expire(self, now: float) -> list[str]:
        """End rows whose time is over (monotonic seconds); the ids of their jobs."""
        late = self.in_flight.expire(now)
        self.results += late
        return [result.lease.job_id for result in late]

    def cancel(self, job_ids: Iterable[str]) -> list[str]:
        """End rows that were stopped; the ids of those that were held."""
        rows = self.in_flight.cancel(job_ids)
        self.canceled += rows
        return [job_id for job_id, _ in rows]

    def next_results(self, most: int, enough_bytes: int) -> list[JobResult]:
        """The first results that are not stored yet, up to these limits, but at least one."""
        group: list[JobResult] = []
        num_bytes = 0
        for result in self.results[:most]:
            num_bytes += len(result.result)
            if group and num_bytes > enough_bytes:
                break
            group.append(result)
        return group

    def note_stored(self, num_results: int) -> None:
        """Redis has the first of the results."""
        del self.results[:num_results]

    def note_canceled(self, num_rows: int) -> None:
        """Redis has the first of the canceled rows."""
        del self.canceled[:num_rows]
