"""Reads results from Redis, in the order in which rows ended or in the order of the input."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from redis import Redis

from batchkv_producer.errors import WireError
from batchkv_producer.monitor.status import BatchStatus, check_there, read_batch
from batchkv_producer.results.bounded import Reader
from batchkv_producer.results.line_set import LineSet
from batchkv_producer.retry import Pace, read_with_retry
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.job import Result, decode_result

PAGE_ROWS = 200
MAX_LINE_DIGITS = 12  # as in the id of a job
NO_POSITION = -1
Look = Callable[[Redis, str], BatchStatus]


@dataclass(frozen=True, slots=True)
class StoredRow:
    """One row's result. ``position``: its index in the finish order, -1 if it was read by line."""

    job_id: str
    line: int
    position: int
    result: Result


def in_finish_order(
    connection: Redis,
    batch_id: str,
    *,
    follow: bool = False,
    after: int = 0,
    look: Look = read_batch,
) -> Iterator[StoredRow]:
    """Each row that has ended, once, from index ``after`` of the finish order on.

    A retried row is twice in that order. It is yielded at its first place that has a result.
    ``follow`` goes on until ``look`` returns a status that is done. A server that crashed may have
    lost its last second, and have other rows now at places that were read already. Then the order
    is read once more from its beginning.
    """
    seen = LineSet()
    position, pace, may_lack = after, Pace(), follow and after == 0
    while True:
        # The status is read before the page, so a row that ends in between is in a later page.
        is_over = not follow or read_with_retry(partial(look, connection, batch_id)).is_done
        lines = read_with_retry(partial(_ended_lines, connection, batch_id, position))
        fresh = [(index, line) for index, line in enumerate(lines, position) if line not in seen]
        for row in _stored(connection, batch_id, fresh):
            if seen.add(row.line):
                yield row
        position += len(lines)
        if lines:
            pace.reset()
        if len(lines) < PAGE_ROWS:
            if not is_over:
                pace.sleep()
            elif may_lack and len(seen) < read_with_retry(
                partial(_num_stored, connection, batch_id)
            ):
                position, may_lack = 0, False
            else:
                return


def in_input_order(
    connection: Redis,
    batch_id: str,
    *,
    follow: bool = False,
    after: int = 0,
    look: Look = read_batch,
) -> Iterator[StoredRow]:
    """Each row that has ended, by line, after line ``after``. ``follow`` waits at each line until
    its row has ended."""
    status = read_with_retry(partial(read_batch, connection, batch_id))
    line, pace = after + 1, Pace()
    while line <= status.last_line:
        is_over = not follow or read_with_retry(partial(look, connection, batch_id)).is_done
        lines = range(line, min(line + PAGE_ROWS, status.last_line + 1))
        values = read_with_retry(partial(Reader(connection).results, batch_id, lines))
        lines = lines[: len(values)]
        pairs = zip(lines, values, strict=True)
        found = {number: value for number, value in pairs if value is not None}
        until = lines.stop
        if not is_over:
            until = read_with_retry(partial(_first_open, connection, status, lines, found.keys()))
        for number, value in found.items():
            if number < until:
                yield _row(batch_id, number, NO_POSITION, value)
        if until == line:
            pace.sleep()
        else:
            pace.reset()
        line = until


def none_missing(
    connection: Redis, batch_id: str, rows: Iterator[StoredRow]
) -> Iterator[StoredRow]:
    """These rows of a batch. NotFoundError after the last one if the batch was deleted meanwhile,
    because some rows may be missing then."""
    yield from rows
    read_with_retry(partial(check_there, connection, batch_id))


def _num_stored(connection: Redis, batch_id: str) -> int:
    return int(connection.hlen(redis_keys.results(batch_id)))


def _ended_lines(connection: Redis, batch_id: str, position: int) -> list[int]:
    raw = connection.lrange(redis_keys.done(batch_id), position, position + PAGE_ROWS - 1)
    lines = [int(line) if line.isdigit() and len(line) <= MAX_LINE_DIGITS else 0 for line in raw]
    if not all(lines):
        raise WireError(f"the finish order of batch {batch_id} on the server cannot be read")
    return lines


def _stored(
    connection: Redis, batch_id: str, places: Sequence[tuple[int, int]]
) -> Iterator[StoredRow]:
    """The rows at these places (position, line) that have a result now."""
    reader = Reader(connection)
    while places:
        lines = [line for _, line in places]
        values = read_with_retry(partial(reader.results, batch_id, lines))
        for (position, line), value in zip(places, values, strict=False):
            if value is not None:
                yield _row(batch_id, line, position, value)
        places = places[len(values) :]


def _row(batch_id: str, line: int, position: int, value: bytes) -> StoredRow:
    job_id = redis_keys.job_id(batch_id, line)
    return StoredRow(job_id, line, position, decode_result(value))


def _first_open(
    connection: Redis, status: BatchStatus, lines: range, ended: Collection[int]
) -> int:
    """The first of these lines whose row has not ended, or the line after them.

    A blank line of the input has neither a result nor, once the batch is submitted, a job. A job
    stays after its row has ended, so a line without a job has no open row.
    """
    missing = [line for line in lines if line not in ended]
    if not missing:
        return lines.stop
    if status.total == status.last_line or not read_batch(connection, status.batch_id).is_submitted:
        return missing[0]
    with connection.pipeline(transaction=False) as pipeline:
        for line in missing:
            pipeline.exists(redis_keys.job(redis_keys.job_id(status.batch_id, line)))
        is_there = pipeline.execute()
    return next((line for line, there in zip(missing, is_there, strict=True) if there), lines.stop)


def rows_among(connection: Redis, batch: BatchStatus, lines: range) -> list[int]:
    """The lines that are rows: all of them, unless the file has blank lines."""
    if batch.total == batch.last_line:
        return list(lines)
    with connection.pipeline(transaction=False) as pipeline:
        for line in lines:
            pipeline.exists(redis_keys.job(redis_keys.job_id(batch.batch_id, line)))
            pipeline.hexists(redis_keys.results(batch.batch_id), str(line))
        replies = pipeline.execute()
    pairs = zip(lines, replies[::2], replies[1::2], strict=True)
    return [line for line, has_job, has_result in pairs if has_job or has_result]
