"""The rows that this worker holds, and how each of them ends. Knows neither Redis nor engine.

A row is held, with a lease, from the moment it is pulled. It stands in the *backlog* first, as the
bytes that it came as, and *starts* when the engine has room: only then it is decoded, and only
then its time runs. A worker that stops can give its backlog back at once. Redis is to know which
rows have started, for only those can have cost their worker's life; of rows that started later
than it was said when they were pulled it is told.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, islice

from batchkv_producer.errors import WireError
from batchkv_producer.wire.job import (
    MAX_JOB_BYTES,
    Endpoint,
    ErrorCode,
    Outcome,
    Request,
    Result,
    decode_job,
    encode_result,
)
from batchkv_producer.wire.maker import NOBODY, Maker
from batchkv_producer.wire.transitions import Ending, Held, Pulled
from batchkv_worker.events import Completed, Rejected, Work


@dataclass(frozen=True, slots=True)
class Flight:
    """One row in the engine's hands. Times are monotonic seconds; no deadline is infinity."""

    lease: Held
    custom_id: str
    endpoint: Endpoint
    started: float
    deadline: float
    rank: int = 0  # of its priority, as ``Pulled`` has it


@dataclass(frozen=True, slots=True)
class _Waiting:
    """One row of the backlog, and until when it may start (monotonic seconds, or infinity)."""

    pulled: Pulled
    until: float


class Flights:
    """Job id -> row: those that the engine has, and the backlog, each as they were pulled."""

    def __init__(self, model: str, worker: str) -> None:
        self._model = model
        self._worker = worker
        self.maker: Maker = NOBODY  # the engine's, once it is there
        self._rows: dict[str, Flight] = {}
        self._backlog: dict[str, _Waiting] = {}
        self._recalled: dict[str, Held] = {}
        self._untold: dict[str, Held] = {}

    def __len__(self) -> int:
        return len(self._rows) + len(self._backlog) + len(self._recalled)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._rows or job_id in self._backlog or job_id in self._recalled

    @property
    def num_started(self) -> int:
        """How many rows the engine has."""
        return len(self._rows)

    @property
    def num_waiting(self) -> int:
        """How many rows stand in the backlog."""
        return len(self._backlog)

    @property
    def leases(self) -> list[Held]:
        """What to renew: the leases of the rows that have started, then those that have not."""
        return self.started + self.backlog + self.recalled

    @property
    def started(self) -> list[Held]:
        """The leases of the rows that the engine has."""
        return [flight.lease for flight in self._rows.values()]

    @property
    def backlog(self) -> list[Held]:
        """The leases of the rows that have not started, in their order."""
        return [row.pulled.lease for row in self._backlog.values()]

    @property
    def recalled(self) -> list[Held]:
        """The leases of the rows that the engine gave back, to go back to the queue."""
        return list(self._recalled.values())

    def started_below(self, rank: int) -> list[str]:
        """Ids of the rows that the engine has and that are less urgent than those of a rank."""
        return [job_id for job_id, flight in self._rows.items() if flight.rank > rank]

    @property
    def untold(self) -> list[Held]:
        """The leases of rows that have started without Redis knowing it."""
        return list(self._untold.values())

    @property
    def backlog_rank(self) -> int:
        """The lowest priority in the backlog, by its index among them; 0 when there is none."""
        return max((row.pulled.rank for row in self._backlog.values()), default=0)

    @property
    def next_deadline(self) -> float:
        """Monotonic seconds; infinity when no row has one."""
        started = (flight.deadline for flight in self._rows.values())
        waiting = (row.until for row in self._backlog.values())
        return min(chain(started, waiting), default=math.inf)

    def hold(self, pulled: Iterable[Pulled]) -> None:
        """Add to the backlog what was pulled."""
        now = time.monotonic()
        for row in pulled:
            self._backlog[row.lease.job_id] = _Waiting(row, now + row.seconds_left)

    def start(self, count: int) -> list[Work | Ending]:
        """Take the first rows out of the backlog; see ``admit`` for what becomes of each.

        One whose batch's deadline is past ends as failed.
        """
        now = time.monotonic()
        chosen = list(islice(self._backlog.values(), count))
        for row in chosen:
            del self._backlog[row.pulled.lease.job_id]
        return [
            self.admit(row.pulled) if row.until > now else self._expired(row.pulled)
            for row in chosen
        ]

    def admit(self, pulled: Pulled) -> Work | Ending:
        """Decode what was pulled: work for the engine, or a failed row when it is not ours."""
        now = time.monotonic()
        try:
            request = _decoded(pulled)
        except WireError as fault:
            flight = Flight(pulled.lease, "", "chat", now, math.inf)
            return self._failed(flight, ErrorCode.INVALID_REQUEST, str(fault))
        deadline = now + pulled.timeout_seconds if pulled.timeout_seconds > 0 else math.inf
        job_id = pulled.lease.job_id
        self._rows[job_id] = Flight(
            lease=pulled.lease,
            custom_id=request.custom_id,
            endpoint=request.endpoint,
            started=now,
            deadline=deadline,
            rank=pulled.rank,
        )
        if not pulled.has_begun:
            self._untold[job_id] = pulled.lease
        return Work(job_id, request, pulled.shared_bytes)

    def note_told(self, begun: Iterable[Held]) -> None:
        """Redis knows that these have started."""
        for lease in begun:
            self._untold.pop(lease.job_id, None)

    def take_back(self, job_ids: Iterable[str]) -> None:
        """The engine has forgotten these, the last first: they are to go back to the queue."""
        flights = [self._leave(job_id) for job_id in job_ids]
        found = {flight.lease.job_id: flight.lease for flight in reversed(flights) if flight}
        self._recalled = {**found, **self._recalled}

    def drop(self, job_id: str) -> bool:
        """Forget a row without an end of our making; whether it was held."""
        was_waiting = self._backlog.pop(job_id, None) is not None
        was_waiting |= self._recalled.pop(job_id, None) is not None
        return self._leave(job_id) is not None or was_waiting

    def end(self, event: Completed | Rejected) -> Ending | None:
        """The end that the engine reports; None when the row is no longer ours."""
        flight = self._leave(event.job_id)
        if flight is None:
            return None
        if isinstance(event, Rejected):
            return self._failed(flight, event.code, event.message)
        usage, busy_ms = event.usage, _busy_ms(flight)
        result = Result(
            custom_id=flight.custom_id,
            endpoint=flight.endpoint,
            outcome="ok",
            model=self._model,
            text=event.text,
            finish_reason=event.finish_reason,
            usage=usage,
            logprobs=event.logprobs,
            worker=self._worker,
            created=int(time.time()),
            busy_ms=busy_ms,
            note=event.note,
            fingerprint=self.maker.fingerprint,
            scheme=self.maker.scheme,
        )
        try:
            blob = encode_result(result)
        except WireError as fault:
            return self._failed(
                flight, ErrorCode.ENGINE_ERROR, f"{fault}: ask for fewer tokens or logprobs"
            )
        return Ending(
            lease=flight.lease,
            outcome="ok",
            result=blob,
            prompt_tokens=usage.prompt,
            completion_tokens=usage.completion,
            cached_tokens=usage.cached,
            busy_ms=busy_ms,
            saved_ms=event.saved_ms,
            is_cut=event.finish_reason == "length",
        )

    def expire(self, now: float) -> list[Ending]:
        """End the rows whose own time is over, and those too late to be started."""
        unstarted = [row.pulled for row in self._backlog.values() if row.until <= now]
        for pulled in unstarted:
            del self._backlog[pulled.lease.job_id]
        late = [row for row in self._rows.values() if row.deadline <= now]
        for flight in late:
            self._leave(flight.lease.job_id)
        return [
            self._failed(row, ErrorCode.TIMEOUT, f"not done in {row.deadline - row.started:g} s")
            for row in late
        ] + [self._expired(pulled) for pulled in unstarted]

    def cancel(self, job_ids: Iterable[str]) -> list[tuple[str, bytes]]:
        """Drop rows that were stopped; (job id, canceled result) of those that we held."""
        rows = []
        for job_id in job_ids:
            flight, words = self._leave(job_id), "stopped while it was running"
            if flight is None and (waiting := self._backlog.pop(job_id, None)) is not None:
                flight, words = _unstarted(waiting.pulled), "stopped before it was started"
            if flight is not None:
                result = self._error(flight, "canceled", (ErrorCode.CANCELED, words))
                rows.append((job_id, encode_result(result)))
        return rows

    def _leave(self, job_id: str) -> Flight | None:
        self._untold.pop(job_id, None)  # what has ended need not be said to have begun
        return self._rows.pop(job_id, None)

    def _expired(self, pulled: Pulled) -> Ending:
        words = "not started by the batch's deadline"
        return self._failed(_unstarted(pulled), ErrorCode.EXPIRED, words)

    def _failed(self, flight: Flight, code: str, message: str) -> Ending:
        result = self._error(flight, "failed", (code, message))
        return Ending(flight.lease, "failed", encode_result(result), busy_ms=result.busy_ms)

    def _error(self, flight: Flight, outcome: Outcome, error: tuple[str, str]) -> Result:
        return Result(
            custom_id=flight.custom_id,
            endpoint=flight.endpoint,
            outcome=outcome,
            model=self._model,
            error=error,
            worker=self._worker,
            created=int(time.time()),
            busy_ms=_busy_ms(flight),
        )


def _busy_ms(flight: Flight) -> int:
    return int((time.monotonic() - flight.started) * 1000)


def _decoded(pulled: Pulled) -> Request:
    if not pulled.data:
        raise WireError(f"job data is missing or larger than {MAX_JOB_BYTES} bytes")
    return decode_job(pulled.data)


def _unstarted(pulled: Pulled) -> Flight:
    """A row of the backlog as a flight that begins and ends now."""
    now = time.monotonic()
    try:
        request = _decoded(pulled)
    except WireError:
        return Flight(pulled.lease, "", "chat", now, math.inf)
    return Flight(pulled.lease, request.custom_id, request.endpoint, now, math.inf)
