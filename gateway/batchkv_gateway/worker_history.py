"""How fast each worker was in the last day, as this gateway saw it: one point a minute.

It reads what workers report anyway. After a restart of the gateway it begins anew.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

from redis import Redis
from redis.exceptions import RedisError

from batchkv_producer.errors import BatchkvError
from batchkv_producer.monitor.workers import read_workers

log = logging.getLogger(__name__)

POINT_SECONDS = 60.0
MAX_POINTS = 1440
MAX_WORKERS = 256
Points = list[tuple[int, int]]  # (seconds since 1970, tokens a second)


class WorkerHistory:
    """Reads in a thread of its own, until it is stopped."""

    def __init__(self, connection: Redis) -> None:
        self._connection = connection
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._points: dict[str, deque[tuple[int, int]]] = {}
        self._thread = threading.Thread(target=self._run, name="worker-history", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        self._thread.join(POINT_SECONDS)

    def points(self) -> dict[str, Points]:
        """Name of a worker -> its points, the oldest first."""
        with self._lock:
            return {name: list(points) for name, points in self._points.items()}

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self.look(int(time.time()))
            except (RedisError, BatchkvError) as fault:
                log.warning("the speed of workers is not known: %s", fault)
            self._stopping.wait(POINT_SECONDS)

    def look(self, now: int) -> None:
        """Add one point for each live worker, and drop those that are gone for a day."""
        found = read_workers(self._connection)
        with self._lock:
            for worker in found:
                rate = worker.tokens_per_second
                if rate is not None and (worker.is_away or not worker.num_running):
                    rate = 0  # an idle one still reports the speed of its last rows
                if rate is not None and (worker.name in self._points or self._has_room()):
                    points = self._points.setdefault(worker.name, deque(maxlen=MAX_POINTS))
                    points.append((now, rate))
            oldest = now - MAX_POINTS * POINT_SECONDS
            for name in [n for n, points in self._points.items() if points[-1][0] < oldest]:
                del self._points[name]

    def _has_room(self) -> bool:
        return len(self._points) < MAX_WORKERS
