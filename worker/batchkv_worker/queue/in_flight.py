"""The rows that this worker holds, and how each of them ends. Knows neither Redis nor engine.

A row is held, with a lease, from the moment it is pulled. It is in the *backlog* first, as bytes
that are not decoded. It *starts* when the engine has room: it is decoded, and its timeout begins. A
worker that stops gives its backlog back at once. Redis must know which rows have started, since
only those can have crashed the worker. Rows that start after their pull are *unreported* until the
next `finish` reports them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, dropwhile, islice

from batchkv_producer.errors import WireError
from batchkv_producer.order.duplicates import can_have_duplicates, request_digest
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
from batchkv_producer.wire.transitions import JobLease, JobResult, Pulled
from batchkv_worker.events import Completed, Rejected, Work
from batchkv_worker.figures.rows import CANCELED, OK, REUSED, RowCounts
from batchkv_worker.queue.runs.pace import Crowd
from batchkv_worker.queue.runs.run_ends import RunEnds, slowdown
from batchkv_worker.queue.runs.sizes import DataSizes, prompt_work, text_size


@dataclass(frozen=True, slots=True)
class StartedRow:
    """A row that the engine has. Times are monotonic seconds; no deadline is infinity."""

    lease: JobLease
    custom_id: str
    endpoint: Endpoint
    started: float
    deadline: float
    rank: int = 0  # of its priority, as ``Pulled`` has it
    num_choices: int = 1  # as ``Work`` has it
    prompt_work: float = 0.0  # of its prompt, as ``pace`` counts it
    digest: bytes = b""  # of its request, if its answer is to be remembered


@dataclass(frozen=True, slots=True)
class _BacklogRow:
    """A row of the backlog, and until when it may start (monotonic seconds, or infinity).

    ``ends``: of its run.
    """

    pulled: Pulled
    until: float
    ends: RunEnds | None = None


class InFlight:
    """The rows that the engine has, the backlog, and rows on their way back to the queue."""

    def __init__(self, model: str, worker: str) -> None:
        self.model = model  # as results name it
        self._worker = worker
        self.counts = RowCounts()
        self.maker: Maker = NOBODY  # the engine's, once it is there
        self._rows: dict[str, StartedRow] = {}
        self._backlog: dict[str, _BacklogRow] = {}
        self._recalled: dict[str, JobLease] = {}
        self.num_recalls = 0  # answers of the engine to recalls, also those that name no row
        self._unreported: dict[str, JobLease] = {}
        self._num_others: int | None = None  # other workers of the queue; None: not known yet
        self._slowdown = 1.0  # how many times slower than this one the slowest of them is
        self.num_started = 0  # rows that the engine has; each choice counts
        self.choices = 1.0  # of a row, on average, of those that the engine had at the last start
        self._sizes = DataSizes()

    def __len__(self) -> int:
        return len(self._rows) + len(self._backlog) + len(self._recalled)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._rows or job_id in self._backlog or job_id in self._recalled

    @property
    def num_waiting(self) -> int:
        """How many rows are in the backlog."""
        return len(self._backlog)

    @property
    def leases(self) -> list[JobLease]:
        """All leases, to be renewed: first those of the rows that have started."""
        return self.started + self.backlog + self.recalled

    @property
    def started(self) -> list[JobLease]:
        """The leases of the rows that the engine has."""
        return [row.lease for row in self._rows.values()]

    @property
    def backlog(self) -> list[JobLease]:
        """The leases of the rows that have not started, in their order."""
        return [row.pulled.lease for row in self._backlog.values()]

    @property
    def not_begun(self) -> list[JobLease]:
        """The leases from the first row of the backlog on that Redis counts as begun.

        There are some only after a pull of rows that turned out to have several choices.
        """
        rows = [row.pulled for row in self._backlog.values()]
        return [row.lease for row in dropwhile(lambda row: not row.has_begun, rows)]

    @property
    def recalled(self) -> list[JobLease]:
        """The leases of rows that the engine gave back. They go back to the queue."""
        return list(self._recalled.values())

    def started_below(self, rank: int) -> list[str]:
        """Ids of the rows that the engine has and that are less urgent than those of a rank."""
        return [job_id for job_id, row in self._rows.items() if row.rank > rank]

    def work_to_begin(self, num_waiting: int, answer_work: float) -> float:
        """The work of the backlog, and of the last started rows, of which ``num_waiting`` wait."""
        waiting = islice(reversed(self._rows.values()), num_waiting)
        prompts = sum(row.prompt_work for row in waiting) + self._sizes.held_work
        num_waiting = min(num_waiting, len(self._rows))
        return prompts + answer_work * (num_waiting + len(self._backlog))

    def prompt_work_of(self, job_id: str) -> float:
        """The work of the prompt of a row that the engine has; 0 of any other."""
        row = self._rows.get(job_id)
        return row.prompt_work if row else 0.0

    @property
    def unreported(self) -> list[JobLease]:
        """The leases of rows that have started, which Redis does not know yet."""
        return list(self._unreported.values())

    @property
    def backlog_rank(self) -> int:
        """The lowest priority in the backlog, by its index among them; 0 when there is none."""
        return max((row.pulled.rank for row in self._backlog.values()), default=0)

    @property
    def next_deadline(self) -> float:
        """Monotonic seconds; infinity when no row has one."""
        started = (row.deadline for row in self._rows.values())
        waiting = (row.until for row in self._backlog.values())
        return min(chain(started, waiting), default=math.inf)

    def hold(self, pulled: Iterable[Pulled]) -> None:
        """Add pulled jobs to the backlog."""
        now, rows = time.monotonic(), list(pulled)
        ends = RunEnds(rows) if rows else None
        for row in rows:
            self._leave_backlog(row.lease.job_id)
            self._backlog[row.lease.job_id] = _BacklogRow(row, now + row.seconds_left, ends)
            self._sizes.hold(len(row.data), row.shared_bytes)

    def note_crowd(self, crowd: Crowd, num_workers: int) -> None:
        """What is known of all workers of the queue, and how many they are."""
        self._num_others, self._slowdown = max(0, num_workers - 1), slowdown(crowd)

    def note_returned(self, leases: Iterable[JobLease]) -> None:
        """Other workers will do these jobs of the backlog, which are neighbours in their run."""
        told: set[int] = set()
        for lease in leases:
            row = self._backlog.get(lease.job_id)
            if row is not None and row.ends is not None and id(row.ends) not in told:
                told.add(id(row.ends))
                row.ends.note_gone(row.pulled)

    def note_reused(self, count: int) -> None:
        """Rows ended at their pull, with remembered answers."""
        if count:
            self.counts.add(REUSED, count=count)

    def start(self, count: int) -> list[Work | JobResult]:
        """Take the first rows out of the backlog, and ``admit`` each.

        Each choice counts: the last row may have more of them than are left of ``count``. A row
        whose batch's deadline is past has failed.
        """
        now = time.monotonic()
        begun: list[Work | JobResult] = []
        while self._backlog and count > 0:
            row = self._leave_backlog(next(iter(self._backlog)))
            assert row is not None
            is_due = row.until > now
            one = self.admit(row.pulled, row.ends) if is_due else self._expired(row.pulled)
            begun.append(one)
            count -= one.num_choices if isinstance(one, Work) else 1
        if self._rows:
            self.choices = self.num_started / len(self._rows)
        return begun

    def admit(self, pulled: Pulled, ends: RunEnds | None = None) -> Work | JobResult:
        """Decode a pulled job: work for the engine, or a failed row for any other data."""
        now = time.monotonic()
        try:
            request = _decoded(pulled)
        except WireError as fault:
            row = StartedRow(pulled.lease, "", "chat", now, math.inf)
            return self._failed(row, ErrorCode.INVALID_REQUEST, str(fault))
        deadline = now + pulled.timeout_seconds if pulled.timeout_seconds > 0 else math.inf
        job_id = pulled.lease.job_id
        elsewhere = None
        if self._num_others is not None and ends is not None:
            shared = pulled.shared_bytes
            elsewhere = ends.elsewhere_bytes(request, shared) if self._num_others else 0
        work = Work(
            *(job_id, request, pulled.shared_bytes),
            elsewhere_bytes=elsewhere,
            slowdown=self._slowdown,
        )
        size = text_size(request)
        self._sizes.note_text(len(pulled.data), size)
        self._leave(job_id)
        self.num_started += work.num_choices
        self._rows[job_id] = StartedRow(
            lease=pulled.lease,
            custom_id=request.custom_id,
            endpoint=request.endpoint,
            started=now,
            deadline=deadline,
            rank=pulled.rank,
            num_choices=work.num_choices,
            prompt_work=prompt_work(size, pulled.shared_bytes),
            digest=_digest(request) if pulled.is_reusing else b"",
        )
        if not pulled.has_begun:
            self._unreported[job_id] = pulled.lease
        return work

    def note_reported(self, begun: Iterable[JobLease]) -> None:
        """Redis knows that these have started."""
        for lease in begun:
            self._unreported.pop(lease.job_id, None)

    def recall(self, job_ids: Iterable[str]) -> None:
        """The engine gave these back, the last first. They go back to the queue."""
        self.num_recalls += 1
        rows = [self._leave(job_id) for job_id in job_ids]
        found = {row.lease.job_id: row.lease for row in reversed(rows) if row}
        self._recalled = {**found, **self._recalled}

    def drop(self, job_id: str) -> bool:
        """Forget a row without a result; whether it was held."""
        was_waiting = self._leave_backlog(job_id) is not None
        was_waiting |= self._recalled.pop(job_id, None) is not None
        return self._leave(job_id) is not None or was_waiting

    def end(self, event: Completed | Rejected) -> JobResult | None:
        """The result of a row whose end the engine reports; None if it is not held any more."""
        row = self._leave(event.job_id)
        if row is None:
            return None
        if isinstance(event, Rejected):
            return self._failed(row, event.code, event.message)
        usage, busy_ms = event.usage, _busy_ms(row)
        result = Result(
            custom_id=row.custom_id,
            endpoint=row.endpoint,
            outcome="ok",
            model=self.model,
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
            reasoning=event.reasoning,
            tool_calls=event.tool_calls,
            token_ids=None if event.prompt_token_ids is None else event.token_ids,
            prompt_token_ids=event.prompt_token_ids,
            more=event.more,
        )
        try:
            blob = encode_result(result)
        except WireError as fault:
            return self._failed(
                row, ErrorCode.ENGINE_ERROR, f"{fault}: ask for fewer tokens, choices or logprobs"
            )
        self.counts.add(OK, usage)
        return JobResult(
            lease=row.lease,
            outcome="ok",
            result=blob,
            prompt_tokens=usage.prompt,
            completion_tokens=usage.completion,
            cached_tokens=usage.cached,
            busy_ms=busy_ms,
            saved_ms=event.saved_ms,
            is_cut=any(choice.finish_reason == "length" for choice in result.choices),
            digest=row.digest,
        )

    def expire(self, now: float) -> list[JobResult]:
        """End the rows past their timeout, and backlog rows past their batch's deadline."""
        unstarted = [row.pulled for row in self._backlog.values() if row.until <= now]
        for pulled in unstarted:
            self._leave_backlog(pulled.lease.job_id)
        late = [row for row in self._rows.values() if row.deadline <= now]
        for row in late:
            self._leave(row.lease.job_id)
        return [
            self._failed(row, ErrorCode.TIMEOUT, f"not done in {row.deadline - row.started:g} s")
            for row in late
        ] + [self._expired(pulled) for pulled in unstarted]

    def cancel(self, job_ids: Iterable[str]) -> list[tuple[str, bytes]]:
        """Drop rows that were stopped; (job id, canceled result) of those that were held."""
        rows = []
        for job_id in job_ids:
            row, words = self._leave(job_id), "stopped while it was running"
            if row is None and (waiting := self._leave_backlog(job_id)) is not None:
                row, words = _unstarted(waiting.pulled), "stopped before it was started"
            if row is not None:
                result = self._error(row, "canceled", (ErrorCode.CANCELED, words))
                rows.append((job_id, encode_result(result)))
                self.counts.add(CANCELED)
        return rows

    def _leave(self, job_id: str) -> StartedRow | None:
        self._unreported.pop(job_id, None)  # `finish` reports its end, which is enough
        row = self._rows.pop(job_id, None)
        self.num_started -= row.num_choices if row else 0
        return row

    def _leave_backlog(self, job_id: str) -> _BacklogRow | None:
        row = self._backlog.pop(job_id, None)
        if row is not None:
            self._sizes.release(len(row.pulled.data), row.pulled.shared_bytes)
        return row

    def _expired(self, pulled: Pulled) -> JobResult:
        words = "not started by the batch's deadline"
        return self._failed(_unstarted(pulled), ErrorCode.EXPIRED, words)

    def _failed(self, row: StartedRow, code: str, message: str) -> JobResult:
        self.counts.add(code)
        result = self._error(row, "failed", (code, message))
        return JobResult(row.lease, "failed", encode_result(result), busy_ms=result.busy_ms)

    def _error(self, row: StartedRow, outcome: Outcome, error: tuple[str, str]) -> Result:
        return Result(
            custom_id=row.custom_id,
            endpoint=row.endpoint,
            outcome=outcome,
            model=self.model,
            error=error,
            worker=self._worker,
            created=int(time.time()),
            busy_ms=_busy_ms(row),
        )


def _digest(request: Request) -> bytes:
    """The digest of a request whose answer may be remembered, else empty."""
    return (request_digest(request) or b"") if can_have_duplicates(request) else b""


def _busy_ms(row: StartedRow) -> int:
    return int((time.monotonic() - row.started) * 1000)


def _decoded(pulled: Pulled) -> Request:
    if not pulled.data:
        raise WireError(f"job data is missing or larger than {MAX_JOB_BYTES} bytes")
    return decode_job(pulled.data)


def _unstarted(pulled: Pulled) -> StartedRow:
    """A row of the backlog as one that starts and ends now."""
    now = time.monotonic()
    try:
        request = _decoded(pulled)
    except WireError:
        return StartedRow(pulled.lease, "", "chat", now, math.inf)
    return StartedRow(pulled.lease, request.custom_id, request.endpoint, now, math.inf)
