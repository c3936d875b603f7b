"""Rows of many megabytes are read in pages of limited bytes, not of limited rows."""

from __future__ import annotations

import base64
import random
import tracemalloc
from collections.abc import Callable, Iterator

import pytest
from redis import Redis

from batchkv_producer.manage import cancel_retry as intervention
from batchkv_producer.manage import reconcile
from batchkv_producer.monitor.status import BatchStatus, read_batch
from batchkv_producer.results import bounded
from batchkv_producer.results.bounded import Reader, stored_results
from batchkv_producer.results.failures import _failed_jobs
from batchkv_producer.results.stored_rows import in_finish_order, in_input_order
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.job import Request, Result, encode_job, encode_result
from support.worker_harness import counts_of, submit

NUM_ROWS = 60
ROW_BYTES = 2**17
PAGE_BYTES = 2**19
ALL_BYTES = NUM_ROWS * ROW_BYTES


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the size of a page to half a megabyte."""
    monkeypatch.setattr(bounded, "ENOUGH_BYTES", PAGE_BYTES)


@pytest.fixture(scope="module")
def text() -> str:
    """Text that does not compress below ``ROW_BYTES``."""
    return base64.b64encode(random.Random(1).randbytes(ROW_BYTES)).decode()


@pytest.fixture
def batch(redis_connection: Redis, text: str) -> BatchStatus:
    """A batch of large rows, none of which has started."""
    data = encode_job(Request("c", "completion", prompt=text))
    made = submit(redis_connection, ["p"] * NUM_ROWS, data=lambda _: data)
    return read_batch(redis_connection, made)


@pytest.fixture
def ended(redis_connection: Redis, batch: BatchStatus, text: str) -> BatchStatus:
    """The same with a large result for each row but the second, as rows that failed."""
    result = Result(custom_id="c", endpoint="completion", outcome="failed", text=text)
    blob = encode_result(result)
    lines = [line for line in range(1, NUM_ROWS + 1) if line != 2]
    redis_connection.hset(
        redis_keys.results(batch.batch_id), mapping={str(line): blob for line in lines}
    )
    redis_connection.rpush(redis_keys.done(batch.batch_id), *lines)
    ids = {f"{batch.batch_id}-{line}": 9e9 for line in lines}
    redis_connection.zadd(redis_keys.registry("failed", batch.queue), ids)
    return batch


def held(call: Callable[[], object]) -> int:
    """The peak of Python's memory during the call."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def drained(rows: Iterator[object]) -> int:
    """The number of items, none of which is kept."""
    return sum(1 for _ in rows)


def test_canceling_holds_a_page(redis_connection: Redis, batch: BatchStatus) -> None:
    """``cancel`` reads the custom_ids from the rows' data, page by page."""
    peak = held(lambda: intervention.cancel_batch(redis_connection, batch))
    assert counts_of(redis_connection, batch.batch_id)["canceled"] == NUM_ROWS
    assert peak < ALL_BYTES / 2


def test_ending_overdue_rows_holds_a_page(redis_connection: Redis, batch: BatchStatus) -> None:
    """Ending rows past their deadline reads page by page, in workers and in clients."""
    redis_connection.hset(redis_keys.batch(batch.batch_id), "expires", 1)
    overdue = read_batch(redis_connection, batch.batch_id)
    peak = held(lambda: drained(reconcile.expire_rows(redis_connection, overdue)))
    assert counts_of(redis_connection, batch.batch_id)["failed"] == NUM_ROWS
    assert peak < ALL_BYTES / 2


def test_looking_for_lost_rows_reads_no_result(redis_connection: Redis, ended: BatchStatus) -> None:
    """The search for lost rows checks whether a row has a result, and does not read it."""
    lost: list[int] = []
    redis_connection.delete(redis_keys.job(f"{ended.batch_id}-2"))
    lines = range(1, NUM_ROWS + 1)
    peak = held(lambda: lost.extend(reconcile.find_lost(redis_connection, ended, lines)))
    assert lost == [2] and peak < ROW_BYTES


@pytest.mark.parametrize("read", [in_finish_order, in_input_order])
def test_reading_results_holds_a_page(
    read: Callable[..., Iterator[object]], redis_connection: Redis, ended: BatchStatus
) -> None:
    """``results`` reads page by page in either order, each row once."""
    counts: list[int] = []
    peak = held(lambda: counts.append(drained(read(redis_connection, ended.batch_id))))
    assert counts == [NUM_ROWS - 1] and peak < ALL_BYTES / 2


def test_the_reasons_of_failures_hold_a_page(redis_connection: Redis, ended: BatchStatus) -> None:
    """The reasons that ``wait`` and ``run`` print are read page by page."""
    counts: list[int] = []
    peak = held(lambda: counts.append(drained(_failed_jobs(redis_connection, ended))))
    assert counts == [NUM_ROWS - 1] and peak < ALL_BYTES / 2


def test_a_page_has_one_row_at_least(
    redis_connection: Redis, ended: BatchStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row larger than a page is read alone. One larger than the limit of a row is not read."""
    monkeypatch.setattr(bounded, "ENOUGH_BYTES", 10)
    lines = [3, 2, 4]
    found = list(stored_results(redis_connection, ended.batch_id, lines))
    assert [line for line, value in found if value] == [3, 4] and found[1] == (2, None)
    ids = [f"{ended.batch_id}-{line}" for line in (*lines, 999)]
    jobs = list(Reader(redis_connection).jobs(ids, [b"queued"]))
    assert [(name, state) for name, state, data in jobs if data] == [
        (i, b"queued") for i in ids[:3]
    ]
    assert jobs[3] == (ids[3], None, None)
    monkeypatch.setattr(bounded, "MAX_RESULT_BYTES", 10)
    monkeypatch.setattr(bounded, "MAX_JOB_BYTES", 10)
    assert list(stored_results(redis_connection, ended.batch_id, [3])) == [(3, b"")]
    assert next(Reader(redis_connection).jobs(ids[:1], [b"queued"]))[2] == b""
