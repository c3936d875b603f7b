"""The counters of batches alone, which are cheap to read for many of them. Read only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from redis import Redis

from batchkv_producer.monitor.status import MAX_COUNT
from batchkv_producer.wire import redis_keys


@dataclass(frozen=True, slots=True)
class Counts:
    """Rows of a batch, and the tokens of those that have ended, as ``BatchStatus`` names them."""

    total: int
    ok: int
    failed: int
    canceled: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


_NAMES = tuple(field.name for field in fields(Counts))


def read_counts(connection: Redis, batch_ids: Sequence[str]) -> dict[str, Counts]:
    """The counts of batches by their full ids. One that is gone or cannot be read is left out."""
    with connection.pipeline(transaction=False) as pipeline:
        for batch_id in batch_ids:
            pipeline.hmget(redis_keys.batch(batch_id), "digest", *_NAMES)
        replies: list[Any] = pipeline.execute()
    found = {}
    for batch_id, (digest, *values) in zip(batch_ids, replies, strict=True):
        counts = _counts(values) if digest is not None else None
        if counts is not None:
            found[batch_id] = counts
    return found


def _counts(values: Sequence[bytes | None]) -> Counts | None:
    """The counts of these texts; None if one of them is no count."""
    try:
        numbers = [int(value or b"0") for value in values]
    except ValueError:
        return None
    return Counts(*numbers) if all(abs(number) <= MAX_COUNT for number in numbers) else None
