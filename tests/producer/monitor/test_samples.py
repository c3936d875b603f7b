"""Samples of a queue: what its workers did in each minute."""

from __future__ import annotations

from dataclasses import replace

import pytest
from redis import Redis

from batchkv_producer.monitor.samples import Sample, read_samples, read_totals
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.figures.samples import MAX_SAMPLES, SampleMoves, WorkCounts

QUEUE = "batchkv:m-1"
COUNTS = WorkCounts(100, 40, 20, 2, 1)


@pytest.fixture
def connection(redis_connection: Redis) -> Redis:
    """A server with two workers of the queue; a third was killed, and its record is gone."""
    for name in "abc":
        redis_connection.sadd(redis_keys.workers(QUEUE), redis_keys.worker(name))
    for name in "ab":
        redis_connection.hset(redis_keys.worker(name), "birth", "2026-01-01T00:00:00Z")
    return redis_connection


def end_minute(connection: Redis, queue: str = QUEUE) -> int:
    """Let the sample that is not stored yet be one of an hour ago; its minute."""
    key = redis_keys.totals(queue)
    before = int(connection.hget(key, "minute") or 0) - 3600  # type: ignore[arg-type]
    connection.hset(key, "minute", str(before))
    return before


def test_a_sample_has_the_work_of_all_workers(connection: Redis) -> None:
    """The sample of a minute has the sums of all workers, and what waited at its end."""
    moves = SampleMoves(connection)
    for name in "ab":  # a worker's first call has nothing to add
        assert moves.count(name, [QUEUE], "1", WorkCounts()) == 0
    connection.rpush(redis_keys.waiting(QUEUE, "high"), "j1")
    connection.rpush(redis_keys.waiting(QUEUE, "low"), "j2", "j3")
    connection.zadd(redis_keys.registry("wip", QUEUE), {"j4:e": 1})
    moves.count("a", [QUEUE], "1", COUNTS)
    moves.count("b", [QUEUE], "1", WorkCounts(10, 0, 5, 1, 0))
    assert read_samples(connection, QUEUE) == []
    at = end_minute(connection)
    assert moves.count("a", [QUEUE], "1", replace(COUNTS, rows_done=7)) == 1
    assert read_samples(connection, QUEUE) == [Sample(at, 3, 1, 2, 110, 40, 25, 3, 1)]
    at = end_minute(connection)
    moves.count("b", [QUEUE], "1", WorkCounts(10, 0, 5, 1, 0))
    assert read_samples(connection, QUEUE)[1:] == [Sample(at, 3, 1, 2, 0, 0, 0, 5, 0)]
    assert read_totals(connection, [QUEUE])[QUEUE] == WorkCounts(110, 40, 25, 8, 1)


def test_work_is_counted_once(connection: Redis) -> None:
    """A call that is repeated adds nothing. A worker that starts again begins at 0."""
    moves = SampleMoves(connection)
    moves.count("a", [QUEUE], "first", WorkCounts())
    for _ in range(3):
        moves.count("a", [QUEUE], "first", COUNTS)
    assert read_totals(connection, [QUEUE])[QUEUE] == COUNTS
    moves.count("a", [QUEUE], "second", WorkCounts(rows_done=1))
    assert read_totals(connection, [QUEUE])[QUEUE] == replace(COUNTS, rows_done=3)
    connection.delete(redis_keys.worker("a"))  # nothing is written into a record that is gone
    moves.count("a", [QUEUE], "second", COUNTS)
    assert not connection.exists(redis_keys.worker("a"))
    assert read_totals(connection, [QUEUE])[QUEUE] == replace(COUNTS, rows_done=3)


def test_a_queue_has_samples_of_one_day(connection: Redis) -> None:
    """The list is capped and expires. A worker of several queues samples each of them."""
    moves = SampleMoves(connection)
    connection.rpush(redis_keys.samples(QUEUE), *(["{}"] * MAX_SAMPLES))
    moves.count("a", [QUEUE, "batchkv:m-2"], "1", WorkCounts())
    connection.rpush(redis_keys.queue("batchkv:m-2"), "j")
    moves.count("a", [QUEUE, "batchkv:m-2"], "1", COUNTS)
    ends = [end_minute(connection), end_minute(connection, "batchkv:m-2")]
    assert moves.count("a", [QUEUE, "batchkv:m-2"], "1", COUNTS) == 2
    assert connection.llen(redis_keys.samples(QUEUE)) == MAX_SAMPLES
    found = [*read_samples(connection, QUEUE), *read_samples(connection, "batchkv:m-2")]
    assert [(one.at, one.waiting, one.rows_done) for one in found] == [
        (ends[0], 0, 2),
        (ends[1], 1, 0),
    ]
    for key in (redis_keys.samples(QUEUE), redis_keys.totals(QUEUE)):
        assert 0 < int(connection.ttl(key)) <= 2 * 86_400  # type: ignore[arg-type]


def test_what_cannot_be_read_is_left_out(connection: Redis) -> None:
    """Entries that are no samples are skipped, and a queue without workers has none."""
    assert read_samples(connection, QUEUE) == [] and read_totals(connection, [QUEUE]) == {}
    sample = '{"at":60,"waiting":1,"running":0,"workers":1,"prompt_tokens":1,"cached_tokens":0'
    sample += ',"completion_tokens":%s,"rows_done":1,"rows_failed":0}'
    wrong = ["", "[]", "3", "[" * 100_000, sample % "-1", sample % "1e300", sample % "true"]
    connection.rpush(redis_keys.samples(QUEUE), *wrong, sample % "9", b"\xff")
    assert [one.completion_tokens for one in read_samples(connection, QUEUE)] == [9]
    connection.hset(redis_keys.totals(QUEUE), mapping={"minute": "60", "rows_done": "x" * 99})
    assert read_totals(connection, [QUEUE])[QUEUE] == WorkCounts()
