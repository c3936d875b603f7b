"""Samples of a queue: how much was done in each minute of the last day, and how much waited."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.figures.samples import MAX_SAMPLES, WorkCounts
from batchkv_producer.wire.live import is_refused

MAX_COUNT = 2**53  # a larger number in a sample is no count


@dataclass(frozen=True, slots=True)
class Sample:
    """One minute of a queue. ``at`` is its beginning, in seconds since 1970.

    ``waiting``, ``running`` (rows with a lease) and ``workers`` are of the last moment in it that a
    worker saw. The other numbers are the work of all workers in that minute.
    """

    at: int
    waiting: int
    running: int
    workers: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    rows_done: int
    rows_failed: int


_FIELDS = tuple(one.name for one in fields(Sample))
_COUNTS = tuple(one.name for one in fields(WorkCounts))


def read_samples(connection: Redis, queue: str) -> list[Sample]:
    """The samples of a queue, the oldest first, of at most a day. Minutes without a worker have
    none. The minute that runs has none yet. Empty on a hub of an older version."""
    found: Any = _allowed(lambda: connection.lrange(redis_keys.samples(queue), -MAX_SAMPLES, -1))
    samples = (_sample(text) for text in found or ())
    return [sample for sample in samples if sample is not None]


def read_totals(connection: Redis, queues: Sequence[str]) -> dict[str, WorkCounts]:
    """The work of all workers of some queues, since each had its first one. Queues that had no
    worker for two days are left out; all are on a hub of an older version."""
    with connection.pipeline(transaction=False) as pipeline:
        for queue in queues:
            pipeline.hmget(redis_keys.totals(queue), "minute", *_COUNTS)
        found: Any = _allowed(pipeline.execute) or [None] * len(queues)
    return {
        queue: WorkCounts(*(_count(text) for text in values[1:]))
        for queue, values in zip(queues, found, strict=True)
        if values and values[0] is not None
    }


def _allowed(read: Callable[[], Any]) -> Any:
    """What a call returns; None if the server refuses it."""
    try:
        return read()
    except RedisError as fault:
        if is_refused(fault):
            return None
        raise


def _sample(text: bytes) -> Sample | None:
    """A stored sample. None for anything else, because anybody may have written it."""
    try:
        found = json.loads(text)
        numbers = [found[name] for name in _FIELDS]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if not all(type(number) is int and 0 <= number < MAX_COUNT for number in numbers):
        return None
    return Sample(*numbers)


def _count(text: bytes | None) -> int:
    is_number = text is not None and text.isdigit() and len(text) < len(str(MAX_COUNT))
    return int(text) if text is not None and is_number else 0
