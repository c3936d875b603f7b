"""The open batches of a server are found again and again without reading all batches."""

from __future__ import annotations

import pytest
from redis import Redis

from batchkv_producer.monitor import open_batches
from batchkv_producer.monitor.open_batches import OpenBatches
from batchkv_producer.wire import redis_keys

NUM_BATCHES = 200
TURN = 20


@pytest.fixture
def batches(redis_connection: Redis, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Batches that are done, the newest last. A search reads 20 of them in turn."""
    monkeypatch.setattr(open_batches, "TURN", TURN)
    ids = [f"{number:016x}" for number in range(NUM_BATCHES)]
    for number, batch_id in enumerate(ids):
        add(redis_connection, batch_id, 1_700_000_000 + 100 * number)
    return ids


def add(connection: Redis, batch_id: str, created: int, num_ok: int = 1) -> None:
    """A batch of one row."""
    fields = {"digest": "0" * 64, "name": "p.txt", "model": "m", "queue": "q", "total": 1}
    fields |= {"num_chunks": 1, "chunks": 1, "ok": num_ok, "created": created}
    connection.hset(redis_keys.batch(batch_id), mapping=fields)
    connection.zadd(redis_keys.BATCHES, {batch_id: created})


def set_ok(connection: Redis, batch_id: str, num_ok: int) -> None:
    connection.hset(redis_keys.batch(batch_id), "ok", num_ok)


def num_read(connection: Redis) -> int:
    """How many times Redis was asked for fields of a batch."""
    stats = connection.info("commandstats")
    return int(stats.get("cmdstat_hmget", {}).get("calls", 0))


def found(finder: OpenBatches) -> list[str]:
    return [batch.batch_id for batch in finder.find({"q"})]


def test_old_open_batches_are_found_at_first(redis_connection: Redis, batches: list[str]) -> None:
    """The first search reads all, and leaves out other queues and what is gone."""
    for batch_id in (batches[0], batches[150], batches[199]):
        set_ok(redis_connection, batch_id, 0)
    redis_connection.hset(redis_keys.batch(batches[150]), "queue", "other")
    redis_connection.delete(redis_keys.batch(batches[7]))
    finder = OpenBatches(redis_connection)
    assert found(finder) == [batches[199], batches[0]]
    assert [batch.batch_id for batch in finder.find({"other"})] == [batches[150]]


def test_a_later_search_reads_few(redis_connection: Redis, batches: list[str]) -> None:
    """It finds what is new, and knows what has ended, was forgotten or is still open."""
    for batch_id in (batches[0], batches[1], batches[2]):
        set_ok(redis_connection, batch_id, 0)
    finder = OpenBatches(redis_connection)
    assert found(finder) == [batches[2], batches[1], batches[0]]
    set_ok(redis_connection, batches[1], 1)
    redis_connection.delete(redis_keys.batch(batches[2]))
    redis_connection.zrem(redis_keys.BATCHES, batches[2])
    add(redis_connection, "f" * 16, 1_800_000_000, num_ok=0)
    before = num_read(redis_connection)
    assert found(finder) == ["f" * 16, batches[0]]
    assert num_read(redis_connection) - before <= TURN + 5


def test_a_retry_is_found_in_turn(redis_connection: Redis, batches: list[str]) -> None:
    """A batch that ended long ago and was retried is found after as many searches as it takes."""
    finder = OpenBatches(redis_connection)
    assert found(finder) == []
    set_ok(redis_connection, batches[3], 0)
    searches = [found(finder) for _ in range(NUM_BATCHES // TURN)]
    assert searches[-1] == [batches[3]]
    set_ok(redis_connection, batches[3], 1)
    assert found(finder) == []
