"""``batchkv retry --from``: queues rows whose jobs are gone, from the file that was submitted.

A job is gone if another tool deleted it, or if RQ has deleted its record of the failure. The file
must be the batch's own. Its digest, with the model and the batch's defaults, proves that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from redis import Redis

from batchkv_producer.errors import UsageError
from batchkv_producer.intake.body import checked_defaults
from batchkv_producer.intake.prompting import kept
from batchkv_producer.intake.source import Source, source_name
from batchkv_producer.manage import cancel_retry as intervention
from batchkv_producer.manage.cancel_retry import (
    PAGE_ROWS,
    could_run,
    have_jobs,
    new_deadline,
)
from batchkv_producer.monitor.status import BatchStatus
from batchkv_producer.monitor.workers import MAX_DIGITS
from batchkv_producer.order.chunk import Chunk
from batchkv_producer.order.planner import BatchPlan
from batchkv_producer.results.failures import Failures
from batchkv_producer.results.stored_rows import in_finish_order
from batchkv_producer.submit.enqueue import DEFAULT_JOB_TIMEOUT_SECONDS
from batchkv_producer.submit.submission import identify
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.batch_options import Deadline
from batchkv_producer.wire.error_codes import INPUT_FAULTS
from batchkv_producer.wire.job import Request, SamplingParams, decode_job
from batchkv_producer.wire.kept_defaults import decode_defaults
from batchkv_producer.wire.transitions import Transitions


@dataclass(frozen=True, slots=True)
class Origin:
    """The ``identity`` and ``cache_salt`` with which a batch was submitted."""

    identity: tuple[bytes, ...] = ()
    cache_salt: str | None = None


NO_ORIGIN = Origin()


def retry_batch(
    connection: Redis,
    status: BatchStatus,
    source: Source | None = None,
    *,
    defaults: SamplingParams | None = None,
    canceled: bool = False,
    job_timeout_seconds: int | None = None,
    expires: Deadline | None = None,
    origin: Origin = NO_ORIGIN,
) -> int:
    """Queue failed (and canceled) rows again. Returns how many.

    Rows whose jobs are gone need ``source``, the file of the submit; see ``restore_rows``. Raises
    UsageError, and changes nothing, if that is another file or the batch's deadline is past.
    """
    if job_timeout_seconds is not None and job_timeout_seconds < 1:
        raise UsageError(f"the job timeout must be at least 1 second, got {job_timeout_seconds}")
    moment = new_deadline(connection, status, expires)
    num_queued = 0
    if source is not None:
        num_queued = restore_rows(
            *(connection, status, source),
            defaults=defaults,
            canceled=canceled,
            job_timeout_seconds=job_timeout_seconds,
            expires=moment,
            origin=origin,
        )
    return num_queued + intervention.retry_batch(
        *(connection, status),
        canceled=canceled,
        job_timeout_seconds=job_timeout_seconds,
        expires=moment,
    )


def restore_rows(
    connection: Redis,
    status: BatchStatus,
    source: Source,
    *,
    defaults: SamplingParams | None = None,
    canceled: bool = False,
    job_timeout_seconds: int | None = None,
    expires: int | None = None,
    origin: Origin = NO_ORIGIN,
) -> int:
    """Queue the failed (and canceled) rows whose jobs are gone again. Returns how many.

    ``defaults`` are those of the submit; None: those that the batch stores. ``expires`` is a new
    deadline (seconds since 1970; 0: none). Raises UsageError if the file is not the batch's.
    """
    moves = Transitions(connection)
    num_queued = 0
    with _plan_of(connection, status, source, defaults, origin) as plan:
        wanted = {
            outcome: set(gone_lines(connection, status.batch_id, outcome))
            for outcome in (("failed", "canceled") if canceled else ("failed",))
        }
        for chunk in plan.chunks() if any(wanted.values()) else ():
            for outcome, lines in wanted.items():
                jobs = [job for job in _jobs(chunk) if job[0] in lines]
                timeout = job_timeout_seconds or status.job_timeout_seconds
                timeout = timeout or DEFAULT_JOB_TIMEOUT_SECONDS
                if jobs:
                    num_queued += moves.restore(
                        *(status.batch_id, status.queue, outcome, jobs),
                        *(chunk.needs, timeout, expires),
                    )
    return num_queued


def requests_of(
    connection: Redis,
    status: BatchStatus,
    source: Source,
    lines: Collection[int],
    *,
    defaults: SamplingParams | None = None,
) -> dict[int, Request]:
    """Line -> request of the valid rows among these lines, from the file of the submit.

    Raises UsageError if the file is not the batch's.
    """
    found = {}
    with _plan_of(connection, status, source, defaults) as plan:
        for chunk in plan.chunks() if lines else ():
            for line, data, _ in _jobs(chunk):
                if line in lines:
                    found[line] = decode_job(data)
    return found


@contextmanager
def _plan_of(
    connection: Redis,
    status: BatchStatus,
    source: Source,
    defaults: SamplingParams | None,
    origin: Origin = NO_ORIGIN,
) -> Iterator[BatchPlan]:
    """The plan of a batch that exists, from its file. Raises UsageError for another file."""
    digest, generation, there = _identity(connection, status.batch_id)
    params = there if defaults is None else checked_defaults(defaults)
    prompting, more_identity = kept(connection, status.batch_id)
    more_identity = (*more_identity, *origin.identity)
    with BatchPlan(params, prompting=prompting, cache_salt=origin.cache_salt) as plan:
        found = identify(source, plan, params, status.model, more_identity, generation)
        if found != digest:
            raise UsageError(
                f"{source_name(source)} with these generation flags does not make batch "
                f"{status.batch_id}: give the file of its submit, and its flags"
            )
        yield plan


def is_any_gone(connection: Redis, batch_id: str, failures: Iterable[Failures]) -> bool:
    """Whether some of these rows have no job. Only rows with a known line are checked."""
    lines = [line for group in failures if group.code not in INPUT_FAULTS for line in group.lines]
    with connection.pipeline(transaction=False) as pipeline:
        for line in lines:
            pipeline.hstrlen(redis_keys.job(redis_keys.job_id(batch_id, line)), "data")
        return not all(pipeline.execute())


def gone_lines(connection: Redis, batch_id: str, outcome: str = "failed") -> Iterator[int]:
    """The lines with this outcome whose rows were valid and have no job any more."""
    rows = (
        row
        for row in in_finish_order(connection, batch_id)
        if row.result.outcome == outcome and could_run(row.result)
    )
    while page := list(islice(rows, PAGE_ROWS)):
        there = have_jobs(connection, page)
        yield from (row.line for row, has_job in zip(page, there, strict=True) if not has_job)


def _jobs(chunk: Chunk) -> list[tuple[int, bytes, int]]:
    return [*chunk.jobs, *((line, data, 0) for line, data, _, _ in chunk.duplicates)]


def _identity(connection: Redis, batch_id: str) -> tuple[str, int, SamplingParams]:
    """A batch's digest, generation and defaults. Batches of older versions lack these."""
    raw: Any = connection.hmget(redis_keys.batch(batch_id), "digest", "generation", "defaults")
    digest, generation, defaults = ((value or b"").decode("utf-8", "replace") for value in raw)
    number = int(generation) if generation.isdigit() and len(generation) < MAX_DIGITS else 1
    return digest, number, decode_defaults(defaults) if defaults else SamplingParams()
