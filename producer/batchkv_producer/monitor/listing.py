"""Lists the batches of a server, newest first, in constant memory.

Ids are read in pages, and batches in transactions of 100. So a server with 100,000 batches can
serve others in between, and a list of fifty reads only fifty.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from redis import Redis

from batchkv_producer.monitor.status import BatchStatus, read_batches
from batchkv_producer.wire import redis_keys

ID_PAGE = 5000
PAGE_BATCHES = 100  # read in one transaction
# A batch that is forgotten meanwhile moves all older ones up by one. So each page begins this many
# ids before the end of the last one.
OVERLAP = 500
# The fields of a batch that say whether it is done, and its queue.
COUNTS = ("total", "ok", "failed", "canceled", "num_chunks", "chunks", "queue")


def newest_first(connection: Redis) -> Iterator[list[BatchStatus]]:
    """All batches of the server, in lists. Batches that are gone are left out."""
    workers: dict[str, int] = {}
    for ids in id_pages(connection):
        for start in range(0, len(ids), PAGE_BATCHES):
            yield read_batches(connection, ids[start : start + PAGE_BATCHES], workers=workers)


def count_batches(connection: Redis) -> int:
    """The number of batches on the server. Expired batches do not count, although ids are left."""
    pages = ([redis_keys.batch(batch_id) for batch_id in ids] for ids in id_pages(connection))
    return sum(int(connection.exists(*keys)) for keys in pages if keys)


def count_open(connection: Redis, most: int) -> dict[str, int]:
    """Queue -> number of batches that are not done, of the newest ``most`` of the server."""
    ids: Any = connection.zrevrange(redis_keys.BATCHES, 0, most - 1)
    with connection.pipeline(transaction=False) as pipeline:
        for batch_id in ids:
            pipeline.hmget(redis_keys.batch(batch_id.decode("utf-8", "replace")), COUNTS)
        found = pipeline.execute()
    counts: dict[str, int] = {}
    for values in found:
        if values[-1] and is_open(values):
            queue = values[-1].decode("utf-8", "replace")
            counts[queue] = counts.get(queue, 0) + 1
    return counts


def is_open(values: list[bytes | None]) -> bool:
    """Whether a batch is not done. ``values``: its ``COUNTS``, None for a batch that is gone."""
    total, ok, failed, canceled, num_chunks, chunks, _ = values
    try:
        num_ended = sum(int(value or 0) for value in (ok, failed, canceled))
        return num_ended != int(total or 0) or num_chunks != chunks
    except ValueError:
        return False


def id_pages(connection: Redis) -> Iterator[list[str]]:
    """All ids, newest first, in lists. Each comes once, even if batches come and go meanwhile."""
    start, before = 0, set[str]()
    while True:
        raw_ids: Any = connection.zrevrange(redis_keys.BATCHES, start, start + ID_PAGE - 1)
        ids = [raw.decode("utf-8", "replace") for raw in raw_ids]
        yield [batch_id for batch_id in ids if batch_id not in before]
        if len(ids) < ID_PAGE:
            return
        start, before = start + ID_PAGE - OVERLAP, set(ids)
