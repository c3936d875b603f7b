"""Suspects: rows that a worker had started when it died. ``lua/suspects.lua`` explains them."""

from __future__ import annotations

import re

from redis import Redis

from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.transitions import MAX_DEATHS

FIRST_ENTRIES = 3  # of each list
HEAD_ENTRIES = 100  # of each list; one death makes every row of an engine a suspect
_GROUP = re.compile(rb"[0-9A-Za-z-]+\.?1?")
_COUNT = re.compile(rb"0*[1-9][0-9]{0,3}")
_MAX_GROUP_CHARS = 50


def is_suspect(group: bytes | None, deaths: bytes | None) -> bool:
    """Reads ``bkv_suspect`` and ``bkv_deaths`` of its job, which anybody may have written.

    Versions without groups wrote the second alone.
    """
    if group and len(group) <= _MAX_GROUP_CHARS and _GROUP.fullmatch(group):
        return True
    return bool(deaths and len(deaths) <= 4 and _COUNT.fullmatch(deaths))


def count_waiting(connection: Redis, queue: str) -> int:
    """How many suspects wait at the heads of a queue's lists.

    It is cheap, for it stops at the first few entries if none of these is a suspect.
    """
    if not _count_among(connection, queue, FIRST_ENTRIES):
        return 0
    return _count_among(connection, queue, HEAD_ENTRIES)


def _count_among(connection: Redis, queue: str, num_entries: int) -> int:
    with connection.pipeline(transaction=False) as pipeline:
        for key in redis_keys.waiting_lists(queue):
            pipeline.lrange(key, 0, num_entries - 1)
        ids = [job_id for found in pipeline.execute() for job_id in found]
        for job_id in ids:
            pipeline.hmget(redis_keys.raw_job(job_id), "bkv_suspect", "bkv_deaths")
        jobs = pipeline.execute(raise_on_error=False)  # a key may be of another type
    return sum(isinstance(job, list) and is_suspect(*job) for job in jobs)


def deaths_until_failed(num_rows: int) -> int:
    """The most workers that one row can kill, if it starts together with others.

    The first death makes the group. Each further death halves it. Then the row runs alone and is
    failed after enough deaths.
    """
    return 1 + max(0, num_rows - 1).bit_length() + MAX_DEATHS
