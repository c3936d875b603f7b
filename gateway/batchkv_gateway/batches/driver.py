"""Advances the open batches of a server in the background, beside the HTTP server.

Each gateway looks at all open batches. A lease keeps two of them from doing the same work; it is no
more than that, because every step can be done twice. After a kill the lease lapses within seconds,
and another gateway, or the same one after its restart, goes on.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import NoPermissionError, RedisError

from batchkv_gateway import redis_keys, scripts
from batchkv_gateway.batches import record as states
from batchkv_gateway.batches.check import LineError
from batchkv_gateway.batches.steps import Steps
from batchkv_gateway.batches.store import Batches
from batchkv_gateway.errors import ApiError
from batchkv_gateway.files.records import Files
from batchkv_producer.errors import BatchkvError, DiskError, ServerError
from batchkv_producer.local.presence import reclaim_dead_of_home
from batchkv_producer.monitor.status import BatchStatus, read_batches
from batchkv_producer.wire.redis_keys import queue_name

log = logging.getLogger(__name__)

NUM_THREADS = 2
TICK_SECONDS = 0.25
LEASE_SECONDS = 3.0
LOOK_SECONDS = 5.0  # between two full looks at a batch that waits for workers, or more:
FULL_LOOKS_PER_SECOND = 20.0  # at all batches together
LOOKS_PER_TICK = 64  # at batches that may have ended meanwhile
REST_SECONDS = 3.0  # after an error of the disk or of Redis
DEATH_SECONDS = 5.0  # between two looks for workers of this machine that died
SWEEP_SECONDS = 600.0


def read_queued(connection: Redis, models: Mapping[str, str]) -> list[BatchStatus]:
    """The statuses of these batches (id -> model) in the queue. Their workers are not counted."""
    workers = {queue_name(model): 0 for model in models.values()}
    return read_batches(connection, list(models), workers=workers) if models else []


class Turns:
    """Chooses some of many ids at a time, so that each has its turn."""

    def __init__(self, most: int) -> None:
        self._most, self._last = most, ""

    def next(self, ids: Sequence[str]) -> list[str]:
        """The ids, which are sorted, that follow the last ones; after the end from the start."""
        start = bisect_right(ids, self._last)
        found = [*ids[start : start + self._most]]
        found += ids[: min(start, self._most - len(found))]
        self._last = found[-1] if found else ""
        return found


class Driver:
    """One gateway's background work. ``nudge`` makes it look at once."""

    def __init__(self, connection: Redis, steps: Steps, batches: Batches, files: Files) -> None:
        self._connection, self._steps = connection, steps
        self._batches, self._files = batches, files
        self._holder = f"{socket.gethostname().replace(' ', '-')}:{os.getpid()}:{time.time_ns()}"
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="batches")
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._busy: set[str] = set()
        self._due: dict[str, float] = {}  # when a batch is looked at in full again
        self._num_open, self._turns = 0, Turns(LOOKS_PER_TICK)
        self._next_sweep = self._next_look = 0.0
        self._silent = set[Path]()  # files of workers that were silent at the last look
        self._thread = threading.Thread(target=self._loop, name="driver", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End after the steps that are under way. They go on in the next start, too."""
        self._stopping.set()
        self._wake.set()
        self._thread.join()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def nudge(self) -> None:
        """Look at the open batches now."""
        self._wake.set()

    def look_at(self, batch_id: str) -> None:
        """Look at one batch in full now."""
        with self._lock:
            self._due.pop(batch_id, None)
        self.nudge()

    def look_soon(self, batch_id: str) -> None:
        """Look at a batch in full within a moment: a client has seen that its rows have ended."""
        with self._lock:
            if batch_id not in self._busy:
                self._due.pop(batch_id, None)

    def _loop(self) -> None:
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                self._tick()
            except RedisError as fault:
                log.warning("Redis: %s", fault)
                self._stopping.wait(REST_SECONDS)
            except Exception:
                log.exception("the background work failed; it is tried again")
                self._stopping.wait(REST_SECONDS)
            spent = time.monotonic() - began
            self._wake.wait(max(TICK_SECONDS, 3 * spent))
            self._wake.clear()

    def _tick(self) -> None:
        self._renew()
        found: Any = self._connection.zrange(redis_keys.OPEN, 0, -1)
        ids = sorted(raw.decode("utf-8", "replace") for raw in found)
        now, self._num_open = time.monotonic(), len(ids)
        with self._lock:
            known = set(ids)
            self._due = {batch_id: at for batch_id, at in self._due.items() if batch_id in known}
            due = [batch_id for batch_id in ids if self._due.get(batch_id, 0.0) <= now]
            others = [batch_id for batch_id in ids if self._due.get(batch_id, 0.0) > now]
        for batch_id in (*due, *self._ended(self._turns.next(others))):
            self._hand_over(batch_id)
        self._forget_spent()
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + DEATH_SECONDS
            self._look_for_deaths()
        if time.monotonic() >= self._next_sweep:
            self._next_sweep = time.monotonic() + SWEEP_SECONDS
            self._sweep()

    def _look_for_deaths(self) -> None:
        """Take back what dead workers of this machine hold. Else calls would wait for them."""
        try:
            reclaim_dead_of_home(self._connection, self._silent)
        except NoPermissionError as fault:
            log.debug("workers of this machine that died are not looked for: %s", fault)
            self._next_look = math.inf
        except OSError as fault:
            log.debug("the files of workers cannot be read: %s", fault)

    def _ended(self, ids: Sequence[str]) -> list[str]:
        """Those of these batches whose rows have all ended, or are overdue."""
        with self._connection.pipeline(transaction=False) as pipeline:
            for batch_id in ids:
                pipeline.hmget(redis_keys.batch(batch_id), "status", "queued_id", "model")
            replies: list[Any] = pipeline.execute()
        waiting: dict[str, str] = {}  # id in the queue -> id
        models: dict[str, str] = {}
        for batch_id, (status, queued_id, model) in zip(ids, replies, strict=True):
            if status == states.IN_PROGRESS.encode() and queued_id:
                name = queued_id.decode("utf-8", "replace")
                waiting[name], models[name] = batch_id, (model or b"").decode("utf-8", "replace")
        for queued in read_queued(self._connection, models):
            if not (queued.is_done or queued.is_overdue or queued.is_forgotten):
                del waiting[queued.batch_id]
        return [*waiting.values()]  # also those that the queue has lost

    def _hand_over(self, batch_id: str) -> None:
        with self._lock:
            if batch_id in self._busy or not self._lease(batch_id):
                return
            self._busy.add(batch_id)
            self._due[batch_id] = time.monotonic() + LOOK_SECONDS
        self._pool.submit(self._work, batch_id)

    def _work(self, batch_id: str) -> None:
        """Advance one batch as far as it goes now. No error ends the thread."""
        rest = max(LOOK_SECONDS, self._num_open / FULL_LOOKS_PER_SECOND)
        try:
            while not self._stopping.is_set() and self._steps.advance(batch_id):
                pass
        except (RedisError, ServerError, DiskError, ApiError, OSError) as fault:
            log.warning("batch %s: %s; it is tried again", batch_id, fault)
            rest = REST_SECONDS
        except BatchkvError as fault:  # its sentence is for people
            log.warning("batch %s fails: %s", batch_id, fault)
            self._fail(batch_id, LineError("batch_lost", str(fault)))
        except Exception as fault:
            log.exception("batch %s fails", batch_id)
            message = f"the gateway failed: {type(fault).__name__}; its log says why"
            self._fail(batch_id, LineError("internal_error", message))
        with self._lock:
            self._due[batch_id] = time.monotonic() + rest
        self._give_back(batch_id)

    def _give_back(self, batch_id: str) -> None:
        with self._lock:
            self._busy.discard(batch_id)
        with suppress(RedisError):
            self._connection.hdel(redis_keys.LEASES, batch_id)

    def _fail(self, batch_id: str, error: LineError) -> None:
        with suppress(RedisError):
            self._steps.fail(batch_id, (error,))

    def _renew(self) -> None:
        with self._lock:
            for batch_id in self._busy:
                self._lease(batch_id)

    def _lease(self, batch_id: str) -> bool:
        milliseconds = int(LEASE_SECONDS * 1000)
        key = redis_keys.LEASES
        return scripts.lease(self._connection, key, batch_id, self._holder, milliseconds)

    def _forget_spent(self) -> None:
        """Delete from the queue what has its files."""
        spent: Any = self._connection.hgetall(redis_keys.SPENT)
        for raw in spent:
            batch_id = raw.decode("utf-8", "replace")
            with self._lock:
                if batch_id in self._busy or not self._lease(batch_id):
                    continue
                self._busy.add(batch_id)
            self._pool.submit(self._forget, batch_id)

    def _forget(self, batch_id: str) -> None:
        """Take the rows of an ended batch from the queue. No error ends the thread."""
        try:
            self._steps.forget(batch_id)
        except Exception as fault:  # noqa: BLE001 - the batch has ended, and stays as it is
            log.warning("the rows of batch %s stay for now: %s", batch_id, fault)
            self._stopping.wait(REST_SECONDS)
        self._give_back(batch_id)

    def _sweep(self) -> None:
        self._files.delete_expired()
        self._files.delete_pending()
        self._batches.delete_ended()
