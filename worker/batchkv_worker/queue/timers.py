"""Small clocks of the session: when to try Redis again, when something is due, when it hangs."""

from __future__ import annotations

import faulthandler
import logging
import sys
import time
from collections.abc import Callable, Sequence

from redis.exceptions import RedisError

from batchkv_worker.queue.redis_side import is_outage
from batchkv_worker.settings import WorkerSettings
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


class Outage:
    """Waits out a server that is away: retries with growing pauses, logs its start and end."""

    FIRST_PAUSE_SECONDS = 0.1
    LONGEST_PAUSE_SECONDS = 2.0
    TELL_SECONDS = 60.0

    def __init__(self) -> None:
        self._since: float | None = None
        self._pause = self.FIRST_PAUSE_SECONDS
        self._tell_at = 0.0
        self.retry_at = 0.0

    @property
    def is_on(self) -> bool:
        """Whether the last attempt failed."""
        return self._since is not None

    @property
    def seconds(self) -> float:
        """How long it has been on; 0 when it is not."""
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
        if now >= self._tell_at:
            log.warning("Redis is away (%s); the engine goes on, results wait here", fault)
            self._tell_at = now + self.TELL_SECONDS
        self.retry_at = now + self._pause
        self._pause = min(self._pause * 2, self.LONGEST_PAUSE_SECONDS)

    def _clear(self) -> None:
        if self._since is not None:
            log.warning("Redis is back after %.1f s", time.monotonic() - self._since)
        self._since = None
        self._pause = self.FIRST_PAUSE_SECONDS
        self._tell_at = self.retry_at = 0.0


class Watchdog:
    """Tells when the engine has work but makes no step.

    It adds up the time between looks, each look counting for a few seconds at most: a process that
    was stopped, or a lid that was closed, is not a hang.
    """

    LONGEST_LOOK_SECONDS = 5.0

    def __init__(self, settings: WorkerSettings) -> None:
        self._step_limit = settings.engine_timeout_seconds
        self._load_limit = max(settings.load_timeout_seconds, settings.engine_timeout_seconds)
        self._last_look = time.monotonic()
        self._num_steps = 0
        self._stalled = 0.0
        self._arm_at = 0.0

    def is_hung(self, num_steps: int, has_work: bool) -> bool:
        """One look. Loading and the first step (compilation) have the longer limit."""
        now = time.monotonic()
        look, self._last_look = min(now - self._last_look, self.LONGEST_LOOK_SECONDS), now
        if not has_work or num_steps != self._num_steps:
            self._num_steps = num_steps
            self._stalled = 0.0
            return False
        self._stalled += look
        return self._stalled > (self._step_limit if num_steps else self._load_limit)

    def arm(self) -> None:
        """Have stacks written by a thread of its own should this one never come to look.

        That is so when a hanging call does not let go of the interpreter. Nothing more can be done
        then: the process stays, its leases lapse, and its jobs go back.
        """
        now = time.monotonic()
        if now >= self._arm_at:
            faulthandler.dump_traceback_later(1.25 * self._step_limit, file=sys.__stderr__ or 2)
            self._arm_at = now + 0.25 * self._step_limit

    def disarm(self) -> None:
        """Nobody will look any more."""
        faulthandler.cancel_dump_traceback_later()

    def dump(self, report: str, job_ids: Sequence[str]) -> None:
        """Write what the engine was doing to the log, and every thread's stack to standard error.

        Ids of jobs alone: what is in them is nobody's business.
        """
        log.critical(
            "the engine has made no step for %.0f s; its stacks are on standard error",
            self._stalled,
        )
        log.critical("the engine: %s", report)
        log.critical("%d jobs go back: %s", len(job_ids), ", ".join(job_ids) or "none")
        faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
