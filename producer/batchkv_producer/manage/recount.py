"""Corrects a batch whose counts differ from its stored results.

Each move is one script. But if the server refuses a command in the middle of a script, it does not
undo the commands before. This happens when rights are removed for a moment, or when the server's
version lacks a command. Then a row may have a result that was never counted, and its batch would
never be done.

Whenever a batch is read, two numbers are compared that show this. If they differ and every row has
a result, all results are read and counted. The counts are written unless the batch has changed
meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from redis import Redis

from batchkv_producer.errors import WireError
from batchkv_producer.monitor.status import BatchStatus
from batchkv_producer.results.bounded import Reader, stored_results
from batchkv_producer.server.memory_use import at_once
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.job import decode_result
from batchkv_producer.wire.transitions import Transitions

PAGE_ROWS = 500
PAGE_ENDS = 10_000  # entries of the finish order read at once

_OPEN = (b"started", b"deferred")


@dataclass(slots=True)
class _Counted:
    """Counts and differences found in the stored results."""

    counts: Counter[str] = field(default_factory=Counter)
    without_end: list[int] = field(default_factory=list)  # lines missing in the finish order
    open_jobs: list[tuple[int, str]] = field(default_factory=list)  # (line, outcome)


def needs_recount(status: BatchStatus) -> bool:
    """Whether the batch's numbers show that a script was cut short.

    False while rows have no result: the batch is open anyway, and more results may come.
    """
    if not status.is_submitted or status.num_results < status.total:
        return False
    if status.is_done:
        return status.keep_seconds > 0 and not status.kept_until
    return status.num_results != status.num_ended


def recount(connection: Redis, status: BatchStatus) -> Iterator[int]:
    """Count a batch's results anew, in steps. Yields 1 at the end if the counts were written."""
    batch_id, moves = status.batch_id, Transitions(connection)

    def ask(pipeline: Any) -> None:
        pipeline.hlen(redis_keys.results(batch_id))
        pipeline.llen(redis_keys.done(batch_id))

    num_results, num_ends = at_once(connection, ask)
    ended = bytearray(status.last_line + 1)
    for start in range(0, num_ends, PAGE_ENDS):
        page: Any = connection.lrange(redis_keys.done(batch_id), start, start + PAGE_ENDS - 1)
        for line in map(int, filter(bytes.isdigit, page)):
            if line < len(ended):
                ended[line] = 1
        yield 0
    found = _Counted()
    for start in range(1, status.last_line + 1, PAGE_ROWS):
        lines = range(start, min(start + PAGE_ROWS, status.last_line + 1))
        _read(connection, batch_id, lines, ended, found)
        yield 0
    for start in range(0, max(len(found.without_end), len(found.open_jobs)), PAGE_ROWS):
        there = (num_results, num_ends)
        page = found.without_end[start : start + PAGE_ROWS]
        jobs = found.open_jobs[start : start + PAGE_ROWS]
        if not moves.recount(batch_id, status.queue, there, page, jobs):
            return
        num_ends += len(page)
        yield 0
    there = (num_results, num_ends)
    yield int(moves.recount(batch_id, status.queue, there, counts=found.counts))


def _read(
    connection: Redis, batch_id: str, lines: Sequence[int], ended: bytearray, found: _Counted
) -> None:
    outcomes: dict[str, tuple[int, str]] = {}
    for line, stored in stored_results(connection, batch_id, lines):
        if stored is None:
            continue
        try:
            result = decode_result(stored)
        except WireError:
            outcome, is_cut = "failed", False  # readers of the result also see a failed row
        else:
            outcome, is_cut = result.outcome, result.finish_reason == "length"
        found.counts[outcome] += 1
        found.counts["cut"] += outcome == "ok" and is_cut
        outcomes[redis_keys.job_id(batch_id, line)] = (line, outcome)
        if not ended[line]:
            found.without_end.append(line)
    jobs = Reader(connection).jobs(list(outcomes), ())
    found.open_jobs += [outcomes[job_id] for job_id, state, _ in jobs if state in _OPEN]
