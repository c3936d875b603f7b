"""Drains a worker: it takes no more rows, ends those that it has begun, and stays alive.

The order is a field of the worker's record, which the worker reads once a second. It ends with the
worker. On a hub only the users ``admin`` and ``worker`` may write that record.
"""

from __future__ import annotations

from redis import Redis
from redis.exceptions import RedisError

from batchkv_producer.errors import NotFoundError, RefusedError
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.live import is_refused
from batchkv_producer.wire.scripts import Scripts


def drain(connection: Redis, name: str) -> None:
    """Let a worker take no more rows. NotFoundError, or RefusedError without the right to."""
    _write(connection, name, "1")


def resume(connection: Redis, name: str) -> None:
    """Let a drained worker take rows again. NotFoundError, or RefusedError."""
    _write(connection, name, "")


def is_ordered(connection: Redis, name: str) -> bool:
    """Whether a worker's record has the order to drain."""
    return bool(connection.hget(redis_keys.worker(name), redis_keys.DRAIN))


class _Order(Scripts):
    def write(self, name: str, value: str) -> bool:
        keys, args = [redis_keys.worker(name)], [redis_keys.DRAIN, value]
        return bool(self._run("drain", keys, args))


def _write(connection: Redis, name: str, value: str) -> None:
    try:
        is_there = _Order(connection).write(name, value)
    except RedisError as fault:
        if not is_refused(fault):
            raise
        raise RefusedError(
            f"this user of the server may not drain or resume {name}: use the admin's URL, or run "
            "the command on the machine of that worker"
        ) from fault
    if not is_there:
        raise NotFoundError(f"no worker {name} lives on this server: see `batchkv workers`")
