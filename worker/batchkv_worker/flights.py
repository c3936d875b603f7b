"""The rows that this worker holds, and how each of them ends. Knows neither Redis nor engine."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

from batchkv_producer.errors import WireError
from batchkv_producer.job import (
    MAX_JOB_BYTES,
    Endpoint,
    ErrorCode,
    Outcome,
    Result,
    decode_job,
    encode_result,
)
from batchkv_producer.transitions import Ending, Held, Pulled
from batchkv_worker.events import Completed, Rejected, Work


@dataclass(frozen=True, slots=True)
class Flight:
    """One row in the engine's hands. Times are monotonic seconds; no deadline is infinity."""

    lease: Held
    custom_id: str
    endpoint: Endpoint
    started: float
    deadline: float


class Flights:
    """Job id -> Flight, in the order in which they were pulled."""

    def __init__(self, model: str, worker: str) -> None:
        self._model = model
        self._worker = worker
        self._rows: dict[str, Flight] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._rows

    @property
    def leases(self) -> list[Held]:
        """What to renew and, in the end, to give back."""
        return [flight.lease for flight in self._rows.values()]

    @property
    def next_deadline(self) -> float:
        """Monotonic seconds; infinity when no row has one."""
        return min((flight.deadline for flight in self._rows.values()), default=math.inf)

    def admit(self, pulled: Pulled) -> Work | Ending:
        """Decode what was pulled: work for the engine, or a failed row when it is not ours."""
        now = time.monotonic()
        try:
            if not pulled.data:
                raise WireError(f"job data is missing or larger than {MAX_JOB_BYTES} bytes")
            request = decode_job(pulled.data)
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
        )
        return Work(job_id, request)

    def drop(self, job_id: str) -> Flight | None:
        """Forget a row without an end of our making."""
        return self._rows.pop(job_id, None)

    def drop_all(self) -> list[Held]:
        """Forget every row; their leases."""
        leases = self.leases
        self._rows.clear()
        return leases

    def end(self, event: Completed | Rejected) -> Ending | None:
        """The end that the engine reports; None when the row is no longer ours."""
        flight = self._rows.pop(event.job_id, None)
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
        )
        return Ending(
            lease=flight.lease,
            outcome="ok",
            result=encode_result(result),
            prompt_tokens=usage.prompt,
            completion_tokens=usage.completion,
            cached_tokens=usage.cached,
            busy_ms=busy_ms,
            saved_ms=event.saved_ms,
        )

    def expire(self, now: float) -> list[Ending]:
        """End the rows whose deadline is past."""
        late = [row for row in self._rows.values() if row.deadline <= now]
        for flight in late:
            del self._rows[flight.lease.job_id]
        return [
            self._failed(row, ErrorCode.TIMEOUT, f"not done in {row.deadline - row.started:g} s")
            for row in late
        ]

    def cancel(self, job_ids: Iterable[str]) -> list[tuple[str, bytes]]:
        """Drop rows that were stopped; (job id, canceled result) of those that we held."""
        rows = []
        for job_id in job_ids:
            flight = self._rows.pop(job_id, None)
            if flight is not None:
                error = (ErrorCode.CANCELED, "stopped while it was running")
                rows.append((job_id, encode_result(self._error(flight, "canceled", error))))
        return rows

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
