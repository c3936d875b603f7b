"""The counters of batches alone."""

from __future__ import annotations

import pytest
from redis import Redis

from batchkv_producer import Client
from batchkv_producer.monitor.counts import read_counts
from batchkv_producer.monitor.status import read_batch
from batchkv_producer.wire import redis_keys


@pytest.fixture
def batch_id(client: Client) -> str:
    """A batch of two rows that wait."""
    return client.submit([{"prompt": "one"}, {"prompt": "two"}], model="m").batch_id


def test_the_counts_are_those_of_the_status(redis_connection: Redis, batch_id: str) -> None:
    """Every count has the value that the batch's status has."""
    redis_connection.hset(
        redis_keys.batch(batch_id), mapping={"ok": 1, "prompt_tokens": 12, "cached_tokens": 4}
    )
    found = read_counts(redis_connection, [batch_id])[batch_id]
    status = read_batch(redis_connection, batch_id)
    names = ("total", "ok", "failed", "canceled", "prompt_tokens", "cached_tokens")
    assert [getattr(found, name) for name in names] == [getattr(status, name) for name in names]
    assert (found.total, found.ok, found.completion_tokens) == (2, 1, 0)


@pytest.mark.parametrize("value", ["x", "9" * 30])
def test_a_batch_that_cannot_be_read_is_left_out(
    redis_connection: Redis, batch_id: str, value: str
) -> None:
    """A count that is none, and an unknown batch, leave their batch out and no other one."""
    redis_connection.copy(redis_keys.batch(batch_id), redis_keys.batch("f" * 16))
    redis_connection.hset(redis_keys.batch("f" * 16), "ok", value)
    found = read_counts(redis_connection, [batch_id, "f" * 16, "0" * 16])
    assert list(found) == [batch_id]
    assert read_counts(redis_connection, []) == {}
