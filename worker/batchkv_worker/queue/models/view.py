"""What a host sees of the queues of its models, and of the other workers that serve them."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from redis import Redis

from batchkv_producer.monitor.workers import WorkerInfo, listed_workers
from batchkv_producer.wire import redis_keys
from batchkv_worker.queue.models.choice import Queue

WATCH_SECONDS = 5.0  # before the speed of a queue counts as known
STANDSTILL_SECONDS = 20.0  # before a queue that does not get shorter counts as one that stands
WINDOW_SECONDS = 60.0  # speeds are means over this time at most


@dataclass(frozen=True, slots=True)
class View:
    """One look. ``queues``: by model. ``workers``: the host's own, by name.

    ``is_suspended``: RQ's workers may take nothing. ``is_drained``: somebody drains this host.
    """

    queues: Mapping[str, Queue] = field(default_factory=dict)
    workers: Mapping[str, WorkerInfo] = field(default_factory=dict)
    is_suspended: bool = False
    is_drained: bool = False


class Watcher:
    """Reads views. Not for several threads."""

    def __init__(
        self,
        connection: Redis,
        name: str,
        models: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection = connection
        self._name = name
        self._queues = {model: redis_keys.queue_name(model) for model in models}
        self._clock = clock
        self._seen: dict[str, deque[tuple[float, int]]] = {model: deque() for model in models}

    def look(self, own: set[str]) -> View:
        """Read a view. ``own``: the names of the host's workers. Raises RedisError."""
        with self._connection.pipeline(transaction=False) as pipeline:
            for queue in self._queues.values():
                for key in redis_keys.waiting_lists(queue):
                    pipeline.llen(key)
                pipeline.llen(redis_keys.live(queue))
                pipeline.exists(redis_keys.live_wish(queue))
                pipeline.exists(redis_keys.live_used(queue))
            pipeline.exists(redis_keys.SUSPENDED)
            pipeline.hget(redis_keys.worker(self._name), redis_keys.DRAIN)
            *found, is_suspended, drain = pipeline.execute()
        workers = [one for one in listed_workers(self._connection) if one.name != self._name]
        each = len(redis_keys.PRIORITIES) + 3
        queues = {
            model: self._queue(model, found[place * each : (place + 1) * each], workers, own)
            for place, model in enumerate(self._queues)
        }
        mine = {one.name: one for one in workers if one.name in own}
        return View(queues, mine, bool(is_suspended), bool(drain))

    def _queue(
        self, model: str, counts: Sequence[Any], workers: Sequence[WorkerInfo], own: set[str]
    ) -> Queue:
        *rows, num_live, is_wished, is_asked = counts
        holders = [one for one in workers if one.name not in own and self._serves(one, model)]
        names = {one.name for one in holders}
        coming = [  # claimed by another host, whose worker is not registered yet
            name
            for one in workers
            if one.is_host and not one.is_away
            for held, name in one.held
            if held == model and name not in names | own
        ]
        is_known = bool(holders) and not coming and all(map(is_ready, holders))
        return Queue(
            num_rows=sum(rows),
            rank=next((rank for rank, count in enumerate(rows) if count), len(rows)),
            num_live=num_live + (is_wished if not holders and not coming else 0),
            is_asked=bool(is_asked),
            num_holders=len(holders) + len(coming),
            seconds_left=self._seconds_left(model, sum(rows), is_known=is_known),
        )

    def _serves(self, worker: WorkerInfo, model: str) -> bool:
        if worker.is_host or worker.is_away or worker.is_resting:
            return False
        return self._queues[model] in worker.queues

    def _seconds_left(self, model: str, num_rows: int, *, is_known: bool) -> float | None:
        """How long the rows of a queue last at the speed of late; None if that is not known."""
        seen, now = self._seen[model], self._clock()
        if not is_known or not num_rows:
            seen.clear()
            return None
        seen.append((now, num_rows))
        while len(seen) > 2 and now - seen[1][0] >= WINDOW_SECONDS:
            seen.popleft()
        began, num_before = seen[0]
        if now - began < WATCH_SECONDS:
            return None
        if num_before <= num_rows:
            return math.inf if now - began >= STANDSTILL_SECONDS else None
        return num_rows * (now - began) / (num_before - num_rows)


def is_ready(worker: WorkerInfo) -> bool:
    """Whether a worker has its model. One that was just born has not said so yet."""
    is_old = worker.num_slots is None and worker.abilities is None  # of a version that never does
    return not worker.is_loading and (is_old or bool(worker.num_slots))
