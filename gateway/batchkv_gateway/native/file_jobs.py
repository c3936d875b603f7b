"""Jobs of an ended batch of OpenAI's API, as the queue had them: read from its files."""

from __future__ import annotations

from collections.abc import Iterator

from batchkv_gateway.native.file_rows import FileRows
from batchkv_producer.errors import NotFoundError
from batchkv_producer.manage.input_lines import MissingLines
from batchkv_producer.monitor.one_job import JobInfo
from batchkv_producer.results.stored_rows import StoredRow
from batchkv_producer.wire.redis_keys import job_id


def stored_rows(files: FileRows) -> Iterator[StoredRow]:
    """All rows with their results. Their positions are those of the files: by line."""
    for position, (line, result) in enumerate(files.results()):
        yield StoredRow(job_id(files.batch_id, line), line, position, result)


def job_ids(files: FileRows) -> Iterator[str]:
    """The ids of all rows' jobs, by line."""
    return (job_id(files.batch_id, line) for line, _ in files.results())


def job(files: FileRows, line: int) -> JobInfo:
    """A row's job as it ended. Raises NotFoundError."""
    result = next((found for number, found in files.results() if number == line), None)
    if result is None:
        raise NotFoundError(f"line {line} of batch {files.batch_id} is no row")
    return JobInfo(
        job_id=job_id(files.batch_id, line),
        status=result.outcome,
        batch_id=files.batch_id,
        line=line,
        custom_id=result.custom_id,
        error=": ".join(result.error or ()),
        reused=result.reused,
    )


def failed_lines(files: FileRows, missing: MissingLines, *, canceled: bool) -> Iterator[str]:
    """The input lines of failed (and canceled) rows. ``missing`` counts those without one."""
    reasons = files.reasons()
    wanted = ("failed", "canceled") if canceled else ("failed",)
    missing.num_wrong += sum(reason == "wrong" for reason in reasons.values())
    missing.num_gone += sum(reason == "expired" for reason in reasons.values())
    for _, raw in files.input_lines({line for line, why in reasons.items() if why in wanted}):
        yield raw.decode("utf-8", "replace").rstrip("\n")
