"""Timers of the session: when something is due, and when to try Redis again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from redis.exceptions import OutOfMemoryError, ReadOnlyError, RedisError

from batchkv_worker.queue.redis_side import is_outage
from batchkv_worker.trace import IDLE, MAIN, REDIS

log = logging.getLogger("batchkv.worker")


class Timer:
    """Something to do every so many seconds, at once the first time. Monotonic seconds."""

    def __init__(self, interval_seconds: float) -> None:
        self._interval = interval_seconds
        self.at = 0.0

    def is_due(self, now: float) -> bool:
        """Whether it is time."""
        return now >= self.at

    def restart(self, now: float) -> None:
        """It was done."""
        self.at = now + self._interval

    def hasten(self, at: float) -> None:
        """It is due at this time, if not before."""
        self.at = min(self.at, at)


class RedisOutage:
    """Waits while Redis is away: retries after growing pauses, logs the beginning and the end."""

    FIRST_PAUSE_SECONDS = 0.1
    LONGEST_PAUSE_SECONDS = 2.0
    LOG_SECONDS = 60.0

    def __init__(self) -> None:
        self._since: float | None = None
        self._pause = self.FIRST_PAUSE_SECONDS
        self._log_at = 0.0
        self.retry_at = 0.0

    @property
    def is_on(self) -> bool:
        """Whether the last attempt failed."""
        return self._since is not None

    @property
    def seconds(self) -> float:
        """How long the outage has lasted; 0 when it is over."""
        return 0.0 if self._since is None else time.monotonic() - self._since

    def attempt(self, action: Callable[[], None]) -> None:
        """Run ``action`` unless it is too early; an error that will not pass is raised."""
        if time.monotonic() < self.retry_at:
            return
        MAIN.enter(REDIS)
        try:
            action()
        except RedisError as fault:
            if not is_outage(fault):
                raise
            self._note(fault)
        else:
            self._clear()
        finally:
            MAIN.enter(IDLE)

    def _note(self, fault: RedisError) -> None:
        now = time.monotonic()
        if self._since is None:
            self._since = now
        if now >= self._log_at:
            what = "takes no writes" if _is_refusal(fault) else "is away"
            log.warning("Redis %s (%s); the engine goes on, results wait here", what, fault)
            self._log_at = now + self.LOG_SECONDS
        self.retry_at = now + self._pause
        self._pause = min(self._pause * 2, self.LONGEST_PAUSE_SECONDS)

    def _clear(self) -> None:
        if self._since is not None:
            log.warning("Redis is back after %.1f s", time.monotonic() - self._since)
        self._since = None
        self._pause = self.FIRST_PAUSE_SECONDS
        self._log_at = self.retry_at = 0.0


def _is_refusal(fault: RedisError) -> bool:
    """Whether the server is there, and is full or may not be written to."""
    is_known = isinstance(fault, OutOfMemoryError | ReadOnlyError)
    return is_known or str(fault).startswith(("OOM", "MISCONF", "READONLY"))
