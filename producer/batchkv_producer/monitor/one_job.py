"""The state of one job. Read only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from redis import Redis

from batchkv_producer.errors import NotFoundError, WireError
from batchkv_producer.monitor.status import gone
from batchkv_producer.monitor.workers import MAX_DIGITS
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.job import decode_job, decode_result

JobStatus = Literal["queued", "running", "ok", "failed", "canceled"]

_FROM_RQ: dict[bytes, JobStatus] = {
    b"queued": "queued",
    b"deferred": "queued",
    b"scheduled": "queued",
    b"created": "queued",
    b"started": "running",
    b"finished": "ok",
    b"failed": "failed",
    b"stopped": "failed",
    b"canceled": "canceled",
}


@dataclass(frozen=True, slots=True)
class JobInfo:
    """One job. ``custom_id`` is None if the server no longer has it.

    ``error``: why a row failed, as ``code: message``. ``reused``: its answer was remembered from an
    earlier batch, for which ``worker`` computed it.
    """

    job_id: str
    status: JobStatus
    batch_id: str
    line: int
    custom_id: str | None
    num_deaths: int = 0
    worker: str = ""
    error: str = ""
    reused: bool = False


def read_job(connection: Redis, job_id: str) -> JobInfo:
    """The state of one job. Raises NotFoundError."""
    batch_id, line = split_job_id(job_id)
    with connection.pipeline(transaction=False) as pipeline:
        pipeline.hget(redis_keys.results(batch_id), str(line))
        names = ("status", "data", "worker_name", "bkv_died", "bkv_deaths")
        pipeline.hmget(redis_keys.job(job_id), *names)
        stored, (status, data, worker, *deaths) = pipeline.execute()
    if stored is not None:
        result = decode_result(stored)
        known = (job_id, result.outcome, batch_id, line, result.custom_id)
        info = JobInfo(*known, worker=result.worker, reused=result.reused)
        return replace(info, error=": ".join(result.error)) if result.error else info
    if status is None:
        if not connection.exists(redis_keys.batch(batch_id)):
            raise gone(connection, batch_id)
        raise NotFoundError(f"no job {job_id} on this server")
    return JobInfo(
        job_id,
        _FROM_RQ.get(status, "queued"),
        batch_id,
        line,
        _custom_id(data or b""),
        max(map(_count, deaths)),
        (worker or b"").decode("utf-8", "replace"),
    )


def _count(raw: bytes | None) -> int:
    return int(raw) if raw and raw.isdigit() and len(raw) < MAX_DIGITS else 0


def split_job_id(job_id: str) -> tuple[str, int]:
    """(batch id, line) of a job id. Raises NotFoundError if the text is no job id."""
    parsed = redis_keys.parse_job_id(job_id)
    if parsed is None:
        raise NotFoundError(f"{job_id!r} is no job id: it looks like 0123456789abcdef-1")
    return parsed


def _custom_id(data: bytes) -> str | None:
    try:
        return decode_job(data).custom_id
    except WireError:
        return None
