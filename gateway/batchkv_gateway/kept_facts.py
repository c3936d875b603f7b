"""The facts of a report, which are made of all results of a batch.

The last ones are in memory. Those of an ended batch of OpenAI's API stay in Redis as long as its
record does, because its results leave the queue.
"""

from __future__ import annotations

import json
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from redis import Redis

from batchkv_gateway import redis_keys
from batchkv_producer.errors import WireError
from batchkv_producer.monitor.status import BatchStatus
from batchkv_producer.remote.decoding import decoded
from batchkv_producer.report.facts import Facts
from batchkv_producer.report.reading import read_facts

MAX_KEPT = 32
Read = Callable[[Redis, str], Facts]


class KeptFacts:
    """Counts one batch at a time, and keeps the facts of 32. 20,000 rows take about a second."""

    def __init__(self, connection: Redis, read: Read = read_facts) -> None:
        self._connection, self._read = connection, read
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[tuple[int, ...], Facts]] = OrderedDict()

    def of(self, batch: BatchStatus) -> Facts:
        """The facts of a batch, made anew if rows have ended since."""
        state = (batch.ok, batch.failed, batch.canceled, batch.created)
        with self._lock:
            known = self._kept.get(batch.batch_id)
            if known is None or known[0] != state:
                known = state, self._read(self._connection, batch.batch_id)
                self._kept[batch.batch_id] = known
            self._kept.move_to_end(batch.batch_id)
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
            return known[1]


def store_facts(connection: Redis, openai_id: str, facts: Facts, seconds: int) -> None:
    """Keep the facts of a batch of OpenAI's API, as a few kilobytes."""
    packed = zlib.compress(json.dumps(asdict(facts), default=sorted).encode())
    with connection.pipeline(transaction=True) as pipeline:
        pipeline.hset(redis_keys.facts(openai_id), "facts", packed)
        pipeline.expire(redis_keys.facts(openai_id), seconds)
        pipeline.execute()


def stored_facts(connection: Redis, openai_id: str) -> Facts | None:
    """The facts of an ended batch of OpenAI's API. None if there are none that can be read."""
    packed: Any = connection.hget(redis_keys.facts(openai_id), "facts")
    if packed is None:
        return None
    try:
        return decoded(Facts, json.loads(zlib.decompress(packed)))
    except (zlib.error, ValueError, WireError):
        return None
