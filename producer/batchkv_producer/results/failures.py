"""Groups the failed rows of a batch by error code, with lines and one message for each code."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from redis import Redis

from batchkv_producer.errors import WireError
from batchkv_producer.monitor.status import BatchStatus
from batchkv_producer.progress import rows
from batchkv_producer.results.bounded import stored_results
from batchkv_producer.results.stored_rows import in_finish_order
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.job import Result, decode_result

MAX_GROUPS = 20
MAX_LINES_SHOWN = 20  # in one group
MAX_MESSAGE_CHARS = 200
MAX_JOBS_READ = 10_000  # from RQ's list of failed jobs, which has jobs of other batches, too
PAGE_ROWS = 500
LOOK_SECONDS = 3.0  # limit for reading a batch's results

_TAIL_NUMBER = re.compile(rb"-([0-9]{1,12})$")


@dataclass(frozen=True, slots=True)
class Failures:
    """The rows that failed with one code: their number, first lines, and the first one's message.

    ``count`` are the rows that were found; there may be more. ``differ``: other rows of them have
    other messages.
    """

    code: str
    count: int
    lines: tuple[int, ...]
    message: str
    differ: bool = False

    def text(self) -> str:
        """``3 rows context_length_exceeded: lines 4, 17, 20: <message>``.

        If the messages differ, it says which line has the message: ``; line 4: <message>``.
        """
        shown = ", ".join(f"{line:,}" for line in self.lines)
        more = f" and {self.count - len(self.lines):,} more" if self.count > len(self.lines) else ""
        word = "line" if self.count == 1 else "lines"
        message = " ".join(self.message.split())
        if len(message) > MAX_MESSAGE_CHARS:
            message = f"{message[:MAX_MESSAGE_CHARS]} ..."
        which = f"; line {self.lines[0]:,}" if self.differ else ""
        return f"{rows(self.count)} {self.code}: {word} {shown}{more}{which}: {message}"


def read_failures(connection: Redis, status: BatchStatus) -> list[Failures]:
    """The failed rows of a batch by code, the most frequent code first.

    A large batch is read for at most ``LOOK_SECONDS``; then some failed rows may be missing.
    """
    if not status.failed:
        return []
    found: dict[int, Result] = dict(_failed_jobs(connection, status))
    if len(found) < status.failed:  # RQ has no job of rows that were wrong or failed long ago
        until = time.monotonic() + LOOK_SECONDS
        for row in in_finish_order(connection, status.batch_id):
            if row.result.outcome == "failed":
                found[row.line] = row.result
            if len(found) >= status.failed or time.monotonic() > until:
                break
    return grouped(found.items())


def grouped(failed: Iterable[tuple[int, Result]]) -> list[Failures]:
    """Group failed rows by code, the most frequent code first, at most ``MAX_GROUPS``."""
    by_code: dict[str, list[tuple[int, str]]] = {}
    for line, result in sorted(failed, key=lambda pair: pair[0]):
        code, message = result.error or ("unknown", "")
        by_code.setdefault(code, []).append((line, message))
    groups = [
        Failures(
            code=code,
            count=len(entries),
            lines=tuple(line for line, _ in entries[:MAX_LINES_SHOWN]),
            message=entries[0][1],
            differ=any(message != entries[0][1] for _, message in entries),
        )
        for code, entries in by_code.items()
    ]
    return sorted(groups, key=lambda group: (-group.count, group.code))[:MAX_GROUPS]


def failure_lines(failures: Iterable[Failures], num_failed: int) -> Iterator[str]:
    """The lines to print: one for each code, and one for failed rows that were not found."""
    num_known = 0
    for group in failures:
        num_known += group.count
        yield group.text()
    if num_known < num_failed:
        yield f"{rows(num_failed - num_known)} failed besides these"


def _failed_jobs(connection: Redis, status: BatchStatus) -> Iterator[tuple[int, Result]]:
    """The batch's rows in RQ's list of failed jobs."""
    key = redis_keys.registry("failed", status.queue)
    ids: Any = connection.zrevrange(key, 0, MAX_JOBS_READ - 1)
    prefix = f"{status.batch_id}-".encode()
    matches = (_TAIL_NUMBER.search(job_id) for job_id in ids if job_id.startswith(prefix))
    names = [int(match[1]) for match in matches if match]
    for first in range(0, len(names), PAGE_ROWS):
        page = names[first : first + PAGE_ROWS]
        for line, value in stored_results(connection, status.batch_id, page):
            result = _decoded(value)
            if result is not None and result.outcome == "failed":
                yield line, result


def _decoded(value: bytes | None) -> Result | None:
    try:
        return None if value is None else decode_result(value)
    except WireError:
        return None
