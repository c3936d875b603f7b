"""The server's memory: the used bytes, and the largest batches."""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from redis import Redis
from redis.exceptions import OutOfMemoryError, RedisError, ResponseError

from batchkv_producer.wire import redis_keys

PAGE_BATCHES = 1000
MAX_MEASURED = 20  # the batches with the most rows are measured
SAMPLED_JOBS = 8  # measured jobs of each batch
SAMPLED_FIELDS = 20  # measured results of each batch
FULL = (
    "is full (maxmemory): make room with `batchkv forget BATCH`, or raise maxmemory. Rows that are "
    "queued are not lost: run the same command again to go on"
)
_UNITS = ("B", "kB", "MB", "GB", "TB")


@dataclass(frozen=True, slots=True)
class BatchMemory:
    """A batch and an estimate of its bytes in the server's memory."""

    batch_id: str
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.batch_id} ({size_text(self.num_bytes)})"


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The server's memory in bytes, and its largest batches. ``max_bytes`` 0: there is no limit."""

    used_bytes: int
    max_bytes: int
    largest: tuple[BatchMemory, ...] = ()

    def __str__(self) -> str:
        limit = f" of {size_text(self.max_bytes)} (maxmemory)" if self.max_bytes else ""
        most = "; most in " + ", ".join(map(str, self.largest)) if self.largest else ""
        return f"{size_text(self.used_bytes)}{limit}{most}"


def read_used_bytes(connection: Redis) -> tuple[int, int] | None:
    """The used bytes and the limit (0: none). None if this user may not read them."""
    try:
        info: dict[str, Any] = connection.info("memory")
        return int(info["used_memory"]), int(info.get("maxmemory", 0))
    except (ResponseError, KeyError, ValueError):
        return None


def read_memory_use(connection: Redis) -> MemoryUse | None:
    """The memory of the server. None if this user may not read it."""
    try:
        info: dict[str, Any] = connection.info("memory")
        return MemoryUse(
            int(info["used_memory"]), int(info.get("maxmemory", 0)), largest(connection)
        )
    except (ResponseError, KeyError, ValueError):
        return None


def largest(connection: Redis, count: int = 3) -> tuple[BatchMemory, ...]:
    """The batches with the most memory, estimated from samples; empty if refused."""
    most = heapq.nlargest(MAX_MEASURED, _totals(connection))
    try:
        found = [
            BatchMemory(batch_id, _measured(connection, batch_id, n)) for n, batch_id in most if n
        ]
    except ResponseError:  # an ACL without MEMORY USAGE
        return ()
    return tuple(sorted(found, key=lambda held: -held.num_bytes)[:count])


def _totals(connection: Redis) -> Iterator[tuple[int, str]]:
    """(number of rows, id) of each batch on the server."""
    raw_ids: Any = connection.zrange(redis_keys.BATCHES, 0, -1)
    for start in range(0, len(raw_ids), PAGE_BATCHES):
        ids = [raw.decode("utf-8", "replace") for raw in raw_ids[start : start + PAGE_BATCHES]]
        with connection.pipeline(transaction=False) as pipeline:
            for batch_id in ids:
                pipeline.hmget(redis_keys.batch(batch_id), "total", "last_line")
            totals = [_whole(last or total or b"0") for total, last in pipeline.execute()]
        yield from zip(totals, ids, strict=True)


@contextmanager
def full_server_named(connection: Redis) -> Iterator[None]:
    """Inside, the error of a full server names the largest batches."""
    try:
        yield
    except RedisError as fault:
        if not is_full(fault):
            raise
        try:
            held = ", ".join(map(str, largest(connection)))
        except RedisError:
            held = ""
        raise OutOfMemoryError(f"OOM{f' [{held}]' if held else ''}") from fault


def at_once(connection: Redis, add: Callable[[Any], object]) -> list[Any]:
    """The replies to commands that read or delete, in one transaction. ``add`` adds them.

    A full Redis refuses each transaction, whatever it does, but not the commands themselves. Then
    they are sent one after the other.
    """
    try:
        return _replies(connection, add, is_one=True)
    except RedisError as fault:
        if not is_full(fault):
            raise
        return _replies(connection, add, is_one=False)


def _replies(connection: Redis, add: Callable[[Any], object], *, is_one: bool) -> list[Any]:
    with connection.pipeline(transaction=is_one) as pipeline:
        add(pipeline)
        return list(pipeline.execute())


def is_full(fault: RedisError) -> bool:
    """Whether the server refused a write because it has reached its ``maxmemory``."""
    return isinstance(fault, OutOfMemoryError) or bool(re.search(r"\bOOM\b", str(fault)))


def full_sentence(text: str) -> str:
    """The end of the sentence about a full server, with the batches of ``full_server_named``."""
    named = re.search(r"\[(.*)\]", text)
    most = f". The largest batches are {named[1]}" if named else ""
    return FULL + most


def size_text(num_bytes: float) -> str:
    """Bytes for people: ``12.3 MB``."""
    unit = 0
    while num_bytes >= 1000 and unit < len(_UNITS) - 1:
        num_bytes, unit = num_bytes / 1000, unit + 1
    return f"{num_bytes:.1f} {_UNITS[unit]}" if unit else f"{num_bytes:.0f} B"


def _measured(connection: Redis, batch_id: str, num_lines: int) -> int:
    step = max(1, num_lines // SAMPLED_JOBS)
    lines = range(1, num_lines + 1, step)
    with connection.pipeline(transaction=False) as pipeline:
        pipeline.memory_usage(redis_keys.results(batch_id), samples=SAMPLED_FIELDS)
        pipeline.memory_usage(redis_keys.done(batch_id))
        for line in lines:
            pipeline.memory_usage(redis_keys.job(redis_keys.job_id(batch_id, line)))
        results, done, *jobs = pipeline.execute()
    per_job = sum(size or 0 for size in jobs) / len(lines)
    return int((results or 0) + (done or 0) + per_job * num_lines)


def _whole(raw: bytes) -> int:
    return int(raw) if raw.isdigit() and len(raw) < 16 else 0
