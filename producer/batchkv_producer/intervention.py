"""Changing what is in the queue already: cancel rows, queue failed or canceled rows again."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from redis import Redis

from batchkv_producer import redis_keys
from batchkv_producer.errors import WireError
from batchkv_producer.formats import default_custom_id
from batchkv_producer.job import ErrorCode, Request, Result, decode_job, encode_result
from batchkv_producer.status import BatchStatus, read_batch, split_job_id
from batchkv_producer.stored import in_finish_order
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


def cancel_batch(connection: Redis, status: BatchStatus) -> int:
    """Cancel every row that has not ended; how many became canceled.

    Rows of a submit that is still going on, or was interrupted, are not there to be canceled:
    they come in with the rest of the submit.
    """
    num_canceled = 0
    for start in range(1, status.last_line + 1, PAGE_ROWS):
        lines = range(start, min(start + PAGE_ROWS, status.last_line + 1))
        num_canceled += _cancel_lines(connection, status, lines)
    Transitions(connection).sweep(status.queue, status.batch_id)
    return num_canceled


def cancel_job(connection: Redis, job_id: str) -> int:
    """Cancel one row; 1 when it became canceled, 0 when it had ended before."""
    batch_id, line = split_job_id(job_id)
    status = read_batch(connection, batch_id)
    num_canceled = _cancel_lines(connection, status, [line])
    if num_canceled:
        connection.lrem(redis_keys.queue(status.queue), 0, job_id)
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
) -> int:
    """Queue failed (and canceled) rows again, in the order in which they ended; how many could be.

    A row that never was a job (bad input), or whose job has expired, stays as it is.
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
            )
    return num_queued


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
        (job_id, encode_result(_canceled(status.model, line, request)))
        for job_id, line, request in _open_jobs(connection, status.batch_id, lines)
    ]
    if not rows:
        return 0
    verdicts = Transitions(connection).settle(status.queue, "canceled", rows)
    for (job_id, _), verdict in zip(rows, verdicts, strict=True):
        if verdict not in ("", "done"):  # the name of the worker that was running it
            command = json.dumps({"command": "stop-job", "job_id": job_id})
            connection.publish(f"rq:pubsub:{verdict}", command)
    return sum(verdict != "" for verdict in verdicts)


def _open_jobs(
    connection: Redis, batch_id: str, lines: Sequence[int]
) -> Iterator[tuple[str, int, Request | None]]:
    """Jobs among these lines that have not ended, with what they ask for (None: unreadable)."""
    with connection.pipeline(transaction=False) as pipeline:
        for line in lines:
            pipeline.hmget(redis_keys.job(redis_keys.job_id(batch_id, line)), "status", "data")
        replies = pipeline.execute()
    for line, (status, data) in zip(lines, replies, strict=True):
        if status in _OPEN:
            yield redis_keys.job_id(batch_id, line), line, _request(data or b"")


def _request(data: bytes) -> Request | None:
    try:
        return decode_job(data)
    except WireError:
        return None


def _canceled(model: str, line: int, request: Request | None) -> Result:
    return Result(
        custom_id=request.custom_id if request else default_custom_id(line),
        endpoint=request.endpoint if request else "chat",
        outcome="canceled",
        model=model,
        error=(ErrorCode.CANCELED, "canceled before it was finished"),
        created=int(time.time()),
    )
