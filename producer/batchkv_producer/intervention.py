"""Changing what is in the queue already: cancel rows, queue failed or canceled rows again."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from redis import Redis

from batchkv_producer import redis_keys
from batchkv_producer.errors import UsageError
from batchkv_producer.job import ErrorCode
from batchkv_producer.one_job import split_job_id
from batchkv_producer.status import BatchStatus, read_batch
from batchkv_producer.stored import in_finish_order
from batchkv_producer.tending import error_row, jobs_in, pages
from batchkv_producer.terms import NEVER, Deadline, moment_text
from batchkv_producer.transitions import Transitions

PAGE_ROWS = 500

INPUT_FAULTS = frozenset(
    {
        ErrorCode.INVALID_JSON,
        ErrorCode.INVALID_REQUEST,
        ErrorCode.DUPLICATE_CUSTOM_ID,
        ErrorCode.UNSUPPORTED_PARAMETER,
    }
)

_OPEN = (b"queued", b"started", b"deferred", b"scheduled")
_CANCELED = (ErrorCode.CANCELED, "canceled before it was finished")


def cancel_batch(connection: Redis, status: BatchStatus) -> int:
    """Cancel every row that has not ended; how many became canceled.

    Rows of a submit that is still going on, or was interrupted, are not there to be canceled:
    they come in with the rest of the submit.
    """
    num_canceled = sum(_cancel_lines(connection, status, lines) for lines in pages(status))
    Transitions(connection).sweep(status.queue, status.batch_id)
    return num_canceled


def cancel_job(connection: Redis, job_id: str) -> int:
    """Cancel one row; 1 when it became canceled, 0 when it had ended before."""
    batch_id, line = split_job_id(job_id)
    status = read_batch(connection, batch_id)
    num_canceled = _cancel_lines(connection, status, [line])
    if num_canceled:
        connection.lrem(redis_keys.waiting(status.queue, status.priority), 0, job_id)
    return num_canceled


@dataclass(frozen=True, slots=True)
class Unanswered:
    """The rows that ended without an answer. Only those of the first two can be queued again."""

    failed: int = 0
    canceled: int = 0
    wrong: int = 0  # in the input: they never were a job
    expired: int = 0  # their job is no longer there


def retry_batch(
    connection: Redis,
    status: BatchStatus,
    *,
    canceled: bool = False,
    job_timeout_seconds: int | None = None,
    expires: Deadline | None = None,
) -> int:
    """Queue failed (and canceled) rows again, in the order in which they ended; how many could be.

    A row that never was a job (bad input), or whose job has expired, stays as it is. Raises
    UsageError when the batch's deadline is past and none is given.
    """
    if job_timeout_seconds is not None and job_timeout_seconds < 1:
        raise UsageError(f"the job timeout must be at least 1 second, got {job_timeout_seconds}")
    transitions = Transitions(connection)
    moment = None if expires is None else _moment(transitions, expires)
    if moment is None and 0 < status.expires <= status.read_at:
        raise UsageError(
            f"the deadline of batch {status.batch_id} was {moment_text(status.expires)}: give its "
            "rows another with --expires 8h, or none with --expires never"
        )
    num_queued = 0
    for outcome in ("failed", "canceled") if canceled else ("failed",):
        for lines in _ended_lines(connection, status.batch_id, outcome):
            num_queued += transitions.retry(
                status.batch_id,
                status.queue,
                lines,
                outcome=outcome,
                timeout_seconds=job_timeout_seconds or 0,
                expires=moment,
            )
    return num_queued


def _moment(transitions: Transitions, expires: Deadline) -> int:
    return 0 if expires == NEVER else expires.moment(transitions.server_seconds)


def count_unanswered(connection: Redis, batch_id: str) -> Unanswered:
    """Count the rows without an answer, by what can be done about them."""
    counts: Counter[str] = Counter()
    for row in in_finish_order(connection, batch_id):
        if row.result.outcome == "ok":
            continue
        job: Any = connection.hstrlen(redis_keys.job(row.job_id), "data")
        if job:
            counts[row.result.outcome] += 1
        else:
            code = row.result.error[0] if row.result.error else ""
            counts["wrong" if code in INPUT_FAULTS else "expired"] += 1
    return Unanswered(**counts)


def _ended_lines(connection: Redis, batch_id: str, outcome: str) -> Iterator[list[int]]:
    page: list[int] = []
    for row in in_finish_order(connection, batch_id):
        if row.result.outcome == outcome:
            page.append(row.line)
        if len(page) == PAGE_ROWS:
            yield page
            page = []
    if page:
        yield page


def _cancel_lines(connection: Redis, status: BatchStatus, lines: Sequence[int]) -> int:
    rows = [
        (job_id, error_row(status.model, line, request, _CANCELED, "canceled"))
        for job_id, line, request in jobs_in(connection, status.batch_id, lines, _OPEN)
    ]
    if not rows:
        return 0
    verdicts = Transitions(connection).settle(status.queue, "canceled", rows)
    for (job_id, _), verdict in zip(rows, verdicts, strict=True):
        if verdict not in ("", "done"):  # the name of the worker that was running it
            command = json.dumps({"command": "stop-job", "job_id": job_id})
            connection.publish(f"rq:pubsub:{verdict}", command)
    return sum(verdict != "" for verdict in verdicts)
