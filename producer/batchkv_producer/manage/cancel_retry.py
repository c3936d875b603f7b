"""Cancels rows, and queues failed or canceled rows again."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from redis import Redis

from batchkv_producer.errors import UsageError
from batchkv_producer.manage.reconcile import error_row, jobs_in, pages
from batchkv_producer.monitor.one_job import split_job_id
from batchkv_producer.monitor.status import BatchStatus, read_batch
from batchkv_producer.results.stored_rows import StoredRow, in_finish_order
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.batch_options import NEVER, Deadline, moment_text
from batchkv_producer.wire.error_codes import INPUT_FAULTS, REFUSED_CODES, ErrorCode
from batchkv_producer.wire.job import Result
from batchkv_producer.wire.transitions import Transitions

PAGE_ROWS = 500

_OPEN = (b"queued", b"started", b"deferred", b"scheduled")
_CANCELED = (ErrorCode.CANCELED, "canceled before it was finished")


def cancel_batch(connection: Redis, status: BatchStatus) -> int:
    """Cancel all rows that have not ended. Returns the number of canceled rows.

    Rows that a submit has not queued yet are not canceled. The rest of the submit queues them.
    """
    num_canceled = sum(_cancel_lines(connection, status, lines) for lines in pages(status))
    Transitions(connection).sweep(status.queue, status.batch_id)
    return num_canceled


def cancel_job(connection: Redis, job_id: str) -> int:
    """Cancel one row. Returns 1 if it was canceled, 0 if it had ended before."""
    batch_id, line = split_job_id(job_id)
    status = read_batch(connection, batch_id)
    num_canceled = _cancel_lines(connection, status, [line])
    if num_canceled:
        connection.lrem(redis_keys.waiting(status.queue, status.priority), 0, job_id)
    return num_canceled


@dataclass(frozen=True, slots=True)
class Unanswered:
    """Counts of rows that ended without an answer. Only failed and canceled can be queued again."""

    failed: int = 0
    canceled: int = 0
    wrong: int = 0  # wrong in the input, so they never had a job
    expired: int = 0  # their job is no longer in Redis
    refused: int = 0  # of the failed ones: another try of the same line fails again


def retry_batch(
    connection: Redis,
    status: BatchStatus,
    *,
    canceled: bool = False,
    job_timeout_seconds: int | None = None,
    expires: int | None = None,
) -> int:
    """Queue failed (and canceled) rows again, in the order in which they ended.

    Returns the number of rows that were queued. Rows without a job stay unchanged: they were wrong
    in the input, or their job has expired.
    """
    transitions = Transitions(connection)
    num_queued = 0
    for outcome in ("failed", "canceled") if canceled else ("failed",):
        for lines in _ended_lines(connection, status.batch_id, outcome):
            num_queued += transitions.retry(
                status.batch_id,
                status.queue,
                lines,
                outcome=outcome,
                timeout_seconds=job_timeout_seconds or 0,
                expires=expires,
            )
    return num_queued


def new_deadline(connection: Redis, status: BatchStatus, expires: Deadline | None) -> int | None:
    """The new deadline in seconds since 1970; 0 is none, None keeps the deadline of the batch.

    Raises UsageError if that one is past and no other is given.
    """
    if expires is not None:
        return 0 if expires == NEVER else expires.moment(Transitions(connection).server_seconds)
    if 0 < status.expires <= status.read_at:
        raise UsageError(
            f"the deadline of batch {status.batch_id} was {moment_text(status.expires)}: set "
            "another one with --expires 8h, or none with --expires never"
        )
    return None


def count_unanswered(connection: Redis, batch_id: str) -> Unanswered:
    """Count the rows without an answer, by the reason."""
    counts: Counter[str] = Counter()
    rows = (row for row in in_finish_order(connection, batch_id) if row.result.outcome != "ok")
    while page := list(islice(rows, PAGE_ROWS)):
        for row, has_job in zip(page, have_jobs(connection, page), strict=True):
            if has_job:
                counts[row.result.outcome] += 1
                counts["refused"] += is_refused(row.result)
            else:
                counts["expired" if could_run(row.result) else "wrong"] += 1
    return Unanswered(**counts)


def have_jobs(connection: Redis, rows: Sequence[StoredRow]) -> list[bool]:
    """For each row, whether Redis still has its job with the request."""
    with connection.pipeline(transaction=False) as pipeline:
        for row in rows:
            pipeline.hstrlen(redis_keys.job(row.job_id), "data")
        return [bool(size) for size in pipeline.execute()]


def could_run(result: Result) -> bool:
    """Whether a row without an answer was valid in the input."""
    return result.error is None or result.error[0] not in INPUT_FAULTS


def is_refused(result: Result) -> bool:
    """Whether a row failed by its own line, which its model or worker refuses."""
    return result.error is not None and result.error[0] in REFUSED_CODES


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
        if verdict not in ("", "done"):  # the name of the worker that runs the row
            command = json.dumps({"command": "stop-job", "job_id": job_id})
            connection.publish(redis_keys.commands(verdict), command)
    return sum(verdict != "" for verdict in verdicts)
