"""Reconciles a batch with Redis: expires overdue rows, recovers rows that tools deleted or moved.

Workers do it in their maintenance, and clients whenever they read a batch. So a batch ends even if
no worker is alive, or other tools deleted or moved its jobs. Every change is a move of
``transitions`` with its guard, so any number of processes may reconcile at once. Long work is done
in steps of one page of rows. Between steps a worker renews its leases.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from redis import Redis
from redis.exceptions import ResponseError

from batchkv_producer.agreed import FAILURE_TTL_SECONDS
from batchkv_producer.errors import NotFoundError, WireError
from batchkv_producer.manage.forget import finish_forget
from batchkv_producer.manage.recount import needs_recount, recount
from batchkv_producer.monitor.queue_state import QueueState, read_queue
from batchkv_producer.monitor.status import BatchStatus, being_forgotten, read_batch
from batchkv_producer.results.bounded import Reader
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.batch_options import moment_text
from batchkv_producer.wire.error_codes import ErrorCode
from batchkv_producer.wire.job import (
    Outcome,
    Request,
    Result,
    decode_job,
    default_custom_id,
    encode_result,
)
from batchkv_producer.wire.row_facts import custom_ids, rows_among
from batchkv_producer.wire.transitions import Transitions

PAGE_ROWS = 500
FORGET_SECONDS = 2.0  # spent at once on deleting a batch that is marked as forgotten
FORGET_STEP_SECONDS = 0.3
REST_SECONDS = 5.0  # until a process reads the lines of an unchanged batch again

_NOT_STARTED = (b"queued", b"deferred")
_ENDED = (b"failed", b"stopped", b"canceled", b"finished")
_TOOL = (ErrorCode.ENGINE_ERROR, "ended by a tool other than batchkv, without a result")
_CANCELED = (ErrorCode.CANCELED, "canceled with one of RQ's own tools")


class Reconciler:
    """Reconciles batches; one for each process."""

    def __init__(self, connection: Redis) -> None:
        self._connection = connection
        self._lines_read: dict[str, tuple[float, tuple[int, ...]]] = {}

    def reconcile_id(self, batch_id: str) -> BatchStatus:
        """Reconcile a batch by its full id. Returns its status afterwards."""
        found = self.reconcile(read_batch(self._connection, batch_id))
        if found.is_forgotten:
            raise being_forgotten(batch_id)
        return found

    def reconcile_all(self, batches: Iterable[BatchStatus]) -> list[BatchStatus]:
        """Reconcile batches. Returns their statuses afterwards, without deleted batches."""
        found = []
        for status in batches:
            with suppress(NotFoundError):
                found.append(self.reconcile(status))
        return found

    def reconcile(self, status: BatchStatus) -> BatchStatus:
        """Reconcile one batch. Returns its status afterwards."""
        return self._after(status) if sum(self.steps(status)) else status

    def steps(self, status: BatchStatus) -> Iterator[int]:
        """Reconcile one batch in steps of some hundred rows. Yields the changed rows of each step.

        If the server refuses writes, nothing is changed.
        """
        with suppress(ResponseError):
            yield from self._steps(status)

    def _steps(self, status: BatchStatus) -> Iterator[int]:
        connection = self._connection
        if status.is_forgotten:
            yield from _forget(connection, status)
            return
        if needs_recount(status) and self._is_due(status, "counts"):
            yield from recount(connection, status)
        if status.is_done and status.num_results >= status.total:
            if _is_to_align(status) and self._is_due(status):
                yield from align_jobs(connection, status)
            return
        yield from self._reconcile_open(status)

    def _reconcile_open(self, status: BatchStatus) -> Iterator[int]:
        connection = self._connection
        state = read_queue(connection, status.queue)
        if state.has_due:
            for num_leaders in Transitions(connection).copies(status.queue):
                yield 1 + num_leaders
        is_stranded = _is_stranded(status, state)
        if not (status.is_overdue or is_stranded) or not self._is_due(status):
            return
        num_done = 0
        if status.is_overdue:
            for num_rows in expire_rows(connection, status):
                num_done += num_rows
                yield num_rows
        if is_stranded:
            again = self._after(status)
            if num_done or (again.num_ended, again.running) == (status.num_ended, status.running):
                yield from mend_rows(connection, again)

    def _after(self, status: BatchStatus) -> BatchStatus:
        return read_batch(self._connection, status.batch_id)

    def _is_due(self, status: BatchStatus, work: str = "") -> bool:
        """Whether to read the batch's lines now: first, after a pause, or when it has changed."""
        now, version = time.monotonic(), (status.queued, status.expires, status.kept_until)
        until, before = self._lines_read.get(status.batch_id + work, (0.0, None))
        if now < until and version == before:
            return False
        self._lines_read[status.batch_id + work] = (now + REST_SECONDS, version)
        return True


def _forget(connection: Redis, status: BatchStatus) -> Iterator[int]:
    until, is_over = time.monotonic() + FORGET_SECONDS, False
    while not is_over and time.monotonic() < until:
        step = min(until, time.monotonic() + FORGET_STEP_SECONDS)
        is_over = finish_forget(connection, status.batch_id, status.queue, step)
        yield int(is_over)


def _is_to_align(status: BatchStatus) -> bool:
    return bool(status.kept_until) and not status.has_aligned_jobs


def _is_stranded(status: BatchStatus, state: QueueState) -> bool:
    """Whether open rows are in no list: no job waits and no job has a lease."""
    return status.is_submitted and not state.num_waiting and not state.num_leased


def expire_rows(connection: Redis, status: BatchStatus) -> Iterator[int]:
    """End the rows that have not started by the deadline. Yields their number for each page."""
    words = f"not started by {moment_text(status.expires)}"
    moves, num_expired = Transitions(connection), 0
    for lines in pages(status):
        rows = [
            (job_id, error_row(status.model, line, request, (ErrorCode.EXPIRED, words)))
            for job_id, line, request in jobs_in(connection, status.batch_id, lines, _NOT_STARTED)
        ]
        verdicts = moves.settle(status.queue, "expired", rows) if rows else []
        num_ended = sum(verdict != "" for verdict in verdicts)
        num_expired += num_ended
        yield num_ended
    if num_expired:
        for _ in moves.sweep_steps(status.queue, status.batch_id):
            yield 0


def mend_rows(connection: Redis, status: BatchStatus) -> Iterator[int]:
    """Queue rows that are in no list again, or store an error for them. Yields counts by page.

    Only to be called when no job waits in the queue and no job has a lease. Duplicates are left for
    the next call: their leaders may be among the rows that are queued again.
    """
    num_mended, num_there, missing = 0, 0, list[int]()
    deferred: list[str] = []
    moves = Transitions(connection)
    for lines in pages(status):
        found = _without_result(connection, status.batch_id, lines)
        missing += [line for line, state in found if state is None]
        there = [(line, state) for line, state in found if state is not None]
        num_there += len(there)
        ids = {line: redis_keys.job_id(status.batch_id, line) for line, _ in there}
        deferred += [ids[line] for line, state in there if state == b"deferred"]
        num_page = _settle_ended(connection, status, lines, there)
        fallen = [ids[line] for line, s in there if s not in (*_ENDED, b"deferred")]
        num_page += moves.mend(status.queue, fallen) if fallen else 0
        num_mended += num_page
        yield num_page
    # Blank lines of the file have no job either. This many of the missing lines are rows:
    num_lost = max(0, status.total - status.num_results - num_there)
    if num_lost:
        known = rows_among(connection, status.batch_id, missing)
        lost = missing[:num_lost] if known is None else known
        for num_page in settle_lost(connection, status, lost):
            num_mended += num_page
            yield num_page
    if not num_mended:
        for start in range(0, len(deferred), PAGE_ROWS):
            yield moves.mend(status.queue, deferred[start : start + PAGE_ROWS])


def settle_lost(connection: Redis, status: BatchStatus, lines: Sequence[int]) -> Iterator[int]:
    """Store an error for rows whose job was deleted. Yields their number for each page."""
    names = custom_ids(connection, status.batch_id, lines)
    for start in range(0, len(lines), PAGE_ROWS):
        rows = []
        for line in lines[start : start + PAGE_ROWS]:
            words = f"the job of input line {line} was deleted from Redis by another tool"
            error = (ErrorCode.LOST, words)
            row = error_row(status.model, line, None, error, custom_id=names.get(line))
            rows.append((redis_keys.job_id(status.batch_id, line), row))
        yield sum(map(bool, Transitions(connection).settle(status.queue, "lost", rows)))


def find_lost(connection: Redis, status: BatchStatus, lines: range) -> list[int]:
    """The lines that have neither a job nor a result, in a batch without blank lines."""
    found = _without_result(connection, status.batch_id, lines)
    return [line for line, state in found if state is None]


def align_jobs(connection: Redis, status: BatchStatus) -> Iterator[int]:
    """Let RQ's records of an ended batch's jobs expire with the batch. Yields 1 at the end."""
    moves = Transitions(connection)
    if status.keep_seconds < FAILURE_TTL_SECONDS or status.is_deduped:
        for lines in pages(status):
            ids = [redis_keys.job_id(status.batch_id, line) for line in lines]
            if not moves.align(status.batch_id, ids):
                return
            yield 0
    yield int(moves.align(status.batch_id, []))


def pages(status: BatchStatus, first_line: int = 1) -> Iterator[range]:
    """The line numbers of a batch's input, some hundred at a time."""
    for start in range(first_line, status.last_line + 1, PAGE_ROWS):
        yield range(start, min(start + PAGE_ROWS, status.last_line + 1))


def jobs_in(
    connection: Redis, batch_id: str, lines: Sequence[int], states: Sequence[bytes]
) -> Iterator[tuple[str, int, Request | None]]:
    """(job id, line, request) of the jobs in one of these states. None: it cannot be read."""
    by_id = {redis_keys.job_id(batch_id, line): line for line in lines}
    for job_id, status, data in Reader(connection).jobs(list(by_id), states):
        if status in states:
            yield job_id, by_id[job_id], _request(data or b"")


def error_row(
    model: str,
    line: int,
    request: Request | None,
    error: tuple[str, str],
    outcome: Outcome = "failed",
    *,
    custom_id: str | None = None,
) -> bytes:
    """The result of a row that no worker ended. ``custom_id`` is used if there is no request."""
    result = Result(
        custom_id=request.custom_id if request else custom_id or default_custom_id(line),
        endpoint=request.endpoint if request else "chat",
        outcome=outcome,
        model=model,
        error=error,
        created=int(time.time()),
    )
    return encode_result(result)


def _settle_ended(
    connection: Redis, status: BatchStatus, lines: range, there: Sequence[tuple[int, bytes]]
) -> int:
    """Store an error for rows whose job was ended by RQ's tools. Returns their number."""
    states = {line: state for line, state in there if state in _ENDED}
    if not states:
        return 0
    rows = [
        (job_id, error_row(status.model, line, request, _reason(states[line])))
        for job_id, line, request in jobs_in(connection, status.batch_id, lines, _ENDED)
        if line in states
    ]
    return sum(map(bool, Transitions(connection).settle(status.queue, "failed", rows)))


def _reason(state: bytes) -> tuple[str, str]:
    return _CANCELED if state == b"canceled" else _TOOL


def _without_result(
    connection: Redis, batch_id: str, lines: range
) -> list[tuple[int, bytes | None]]:
    """(line, state of its job or None) of lines without a result, read in one transaction."""
    return Reader(connection).unended(batch_id, lines)


def _request(data: bytes) -> Request | None:
    try:
        return decode_job(data)
    except WireError:
        return None
