"""The contents of a queue, of all batches."""

from __future__ import annotations

from dataclasses import dataclass

from redis import Redis

from batchkv_producer.wire import redis_keys


@dataclass(frozen=True, slots=True)
class QueueState:
    """A queue: its entries, its leases, and whether duplicates wait for a leader that ended."""

    num_waiting: int
    num_leased: int
    has_due: bool


def read_queue(connection: Redis, name: str) -> QueueState:
    """The state of a queue, read in one transaction."""
    with connection.pipeline(transaction=True) as pipeline:
        for key in redis_keys.waiting_lists(name):
            pipeline.llen(key)
        pipeline.zcard(redis_keys.registry("wip", name))
        pipeline.exists(redis_keys.due(name))
        high, normal, low, num_leased, has_due = pipeline.execute()
    return QueueState(high + normal + low, num_leased, bool(has_due))
