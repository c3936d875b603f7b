"""The contents of a queue, of all batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from redis import Redis

from batchkv_producer.server.memory_use import at_once
from batchkv_producer.wire import redis_keys


@dataclass(frozen=True, slots=True)
class QueueState:
    """A queue: its entries, its leases, and whether duplicates wait for a leader that ended."""

    num_waiting: int
    num_leased: int
    has_due: bool


def read_queue(connection: Redis, name: str) -> QueueState:
    """The state of a queue, read in one transaction."""

    def ask(pipeline: Any) -> None:
        for key in redis_keys.waiting_lists(name):
            pipeline.llen(key)
        pipeline.zcard(redis_keys.registry("wip", name))
        pipeline.exists(redis_keys.due(name))

    high, normal, low, num_leased, has_due = at_once(connection, ask)
    return QueueState(high + normal + low, num_leased, bool(has_due))


MAX_QUEUES = 500


@dataclass(frozen=True, slots=True)
class QueueLoad:
    """How much waits in a queue, by priority. ``num_live``: live rows that wait.

    ``oldest_seconds``: the age of the oldest batch that has a row at the head of a list; 0 if none
    waits.
    """

    name: str
    waiting: Mapping[str, int]
    num_live: int
    num_running: int
    oldest_seconds: float

    @property
    def has_rows(self) -> bool:
        """Whether any row waits or runs."""
        return bool(self.num_live or self.num_running or any(self.waiting.values()))


def read_loads(connection: Redis, names: Iterable[str] = ()) -> list[QueueLoad]:
    """The loads of all queues that ever had a row, and of these; at most ``MAX_QUEUES``."""
    members: Any = connection.smembers(redis_keys.RQ_QUEUES)
    prefix = redis_keys.queue("")
    known = {one.decode("utf-8", "replace").removeprefix(prefix) for one in members}
    suffixes = tuple(f":{priority}" for priority in redis_keys.PRIORITIES)  # of lists of a queue
    ours = {one for one in known if one.startswith(redis_keys.QUEUE_PREFIX)}
    ours = {one for one in ours if not one.endswith(suffixes)}
    queues = sorted(ours | set(names))[:MAX_QUEUES]
    with connection.pipeline(transaction=False) as pipeline:
        pipeline.time()
        for queue in queues:
            for key in redis_keys.waiting_lists(queue):
                pipeline.llen(key)
                pipeline.lrange(key, 0, 0)
            pipeline.llen(redis_keys.live(queue))
            pipeline.zcard(redis_keys.registry("wip", queue))
        (now, _), *found = pipeline.execute()
    each = 2 * len(redis_keys.PRIORITIES) + 2
    parts = [found[start : start + each] for start in range(0, len(found), each)]
    heads = [_batches_of(part[1:-2:2]) for part in parts]
    created = _created(connection, {batch for batches in heads for batch in batches})
    return [
        QueueLoad(
            queue,
            dict(zip(redis_keys.PRIORITIES, part[:-2:2], strict=True)),
            part[-2],
            part[-1],
            max((max(0.0, now - created.get(batch, now)) for batch in batches), default=0.0),
        )
        for queue, part, batches in zip(queues, parts, heads, strict=True)
    ]


def _batches_of(heads: Iterable[list[bytes]]) -> list[str]:
    """The batches of the rows at the heads of some lists."""
    texts = (head[0].decode("utf-8", "replace") for head in heads if head)
    return [parsed[0] for text in texts if (parsed := redis_keys.parse_job_id(text))]


def _created(connection: Redis, batches: Iterable[str]) -> dict[str, int]:
    """Batch -> when it was made. Others are left out."""
    wanted = sorted(batches)
    with connection.pipeline(transaction=False) as pipeline:
        for batch in wanted:
            pipeline.hget(redis_keys.batch(batch), "created")
        times = pipeline.execute()
    return {
        batch: int(time)
        for batch, time in zip(wanted, times, strict=True)
        if time and time.isdigit() and len(time) < 12
    }
