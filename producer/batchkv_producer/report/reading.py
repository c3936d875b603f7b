"""Reads the facts of a batch: one pass over its results, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from redis import Redis

from batchkv_producer.errors import NotFoundError, WireError
from batchkv_producer.monitor.status import BatchStatus, find_batch, read_batch
from batchkv_producer.monitor.workers import WorkerInfo, serving_workers
from batchkv_producer.report.counting import Counting
from batchkv_producer.report.facts import Facts
from batchkv_producer.report.settings import settings_of
from batchkv_producer.results.bounded import Reader
from batchkv_producer.results.stored_rows import StoredRow
from batchkv_producer.retry import read_with_retry
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.job import decode_result
from batchkv_producer.wire.stamp import unstamped

PAGE_ROWS = 1000
OnRow = Callable[[StoredRow], None]
OnProgress = Callable[[int, int], None]  # lines read, and all lines


def read_facts(
    connection: Redis,
    batch_id: str,
    *,
    on_row: OnRow = lambda _: None,
    on_progress: OnProgress = lambda _, __: None,
) -> Facts:
    """The facts of a batch by its id or a prefix of it. Raises NotFoundError.

    ``on_row`` gets each row that can be read, in the order of the input. The batch may be under
    way: the status is read last, so the sums are never behind the rows.
    """
    full_id = find_batch(connection, batch_id)
    before = read_with_retry(partial(read_batch, connection, full_id))
    counting = Counting(before.created, before.read_at)
    for line, value in _values(connection, before, on_progress):
        try:
            is_copy = unstamped(value)[0] is not None
            row = StoredRow(redis_keys.job_id(full_id, line), line, -1, decode_result(value))
        except WireError:
            counting.num_unreadable += 1
            continue
        counting.add(line, row.result, is_copy=is_copy)
        on_row(row)
    try:
        status = read_with_retry(partial(read_batch, connection, full_id))
    except NotFoundError as fault:
        raise NotFoundError(f"{fault}; it was deleted while its results were read") from fault
    serving = read_with_retry(partial(serving_workers, connection, status.queue))
    return facts_of(counting, status, serving, settings_of(connection, status))


def facts_of(
    counting: Counting,
    status: BatchStatus,
    serving: Sequence[WorkerInfo],
    settings: Sequence[tuple[str, str]],
) -> Facts:
    """The facts, once all rows are counted."""
    return counting.facts(status, {worker.name: worker.version for worker in serving}, settings)


def _values(
    connection: Redis, batch: BatchStatus, on_progress: OnProgress
) -> Iterator[tuple[int, bytes]]:
    """(line, stored result) of each row that has ended, in the order of the input."""
    reader, line = Reader(connection), 1
    while line <= batch.last_line:
        lines = range(line, min(line + PAGE_ROWS, batch.last_line + 1))
        values = read_with_retry(partial(reader.results, batch.batch_id, lines))
        for number, value in zip(lines, values, strict=False):
            if value is not None:
                yield number, value
        line += len(values)
        on_progress(line - 1, batch.last_line)
