"""Finds the batches that are not done, again and again, on servers with very many batches.

The first search reads all batches. Later ones read those that were open, those that are new, and
some of all others in turn, because a retry may have opened them. So with up to ``TURN`` batches
each search is complete. With more, a batch that was retried long after its end is found after some
searches.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any

from redis import Redis

from batchkv_producer.monitor.listing import COUNTS, PAGE_BATCHES, id_pages, is_open
from batchkv_producer.monitor.status import BatchStatus, read_batches
from batchkv_producer.wire import redis_keys

TURN = 500  # older batches that one search reads
OVERLAP_SECONDS = 60.0  # by which a server's clock may go back without delaying what is new


class OpenBatches:
    """The open batches of one server. Thread-safe."""

    def __init__(self, connection: Redis) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._known: dict[str, str] = {}  # open batch -> its queue
        self._newest: float | None = None  # when the newest batch was made; None before a search
        self._rank = 0  # of the next turn, from the newest on

    def find(self, queues: Collection[str]) -> list[BatchStatus]:
        """The batches of these queues that are not done, newest first. Nothing is reconciled."""
        with self._lock:
            self._search()
            wanted = [name for name, queue in self._known.items() if queue in queues]
        found: list[BatchStatus] = []
        for start in range(0, len(wanted), PAGE_BATCHES):
            found += read_batches(self._connection, wanted[start : start + PAGE_BATCHES])
        found = [batch for batch in found if not batch.is_done]
        return sorted(found, key=lambda batch: (batch.created, batch.batch_id), reverse=True)

    def _search(self) -> None:
        key = redis_keys.BATCHES
        newest: Any = self._connection.zrange(key, 0, 0, desc=True, withscores=True)
        if self._newest is None:
            self._read([name for page in id_pages(self._connection) for name in page])
        else:
            since = self._newest - OVERLAP_SECONDS
            new: Any = self._connection.zrange(key, "+inf", since, desc=True, byscore=True)
            turn: Any = self._connection.zrange(key, self._rank, self._rank + TURN - 1, desc=True)
            self._rank = self._rank + TURN if len(turn) == TURN else 0
            names = {raw.decode("utf-8", "replace") for raw in (*new, *turn)}
            self._read([*(names | self._known.keys())])
        self._newest = newest[0][1] if newest else self._newest

    def _read(self, names: list[str]) -> None:
        """Learn which of these batches are open."""
        for start in range(0, len(names), PAGE_BATCHES):
            page = names[start : start + PAGE_BATCHES]
            with self._connection.pipeline(transaction=False) as pipeline:
                for name in page:
                    pipeline.hmget(redis_keys.batch(name), COUNTS)
                replies: list[Any] = pipeline.execute()
            for name, values in zip(page, replies, strict=True):
                if values[-1] is not None and is_open(values):
                    self._known[name] = values[-1].decode("utf-8", "replace")
                else:
                    self._known.pop(name, None)
