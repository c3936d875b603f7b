"""Notices when the engine has work but makes no step."""

from __future__ import annotations

import faulthandler
import logging
import sys
import time
from collections.abc import Iterable, Sequence

from batchkv_worker.settings import WorkerSettings

log = logging.getLogger("batchkv.worker")


class Watchdog:
    """Adds up the time without a step between looks at the engine.

    Each look counts for a few seconds at most. A process that was stopped, or a laptop that slept,
    is not a hang.
    """

    LONGEST_LOOK_SECONDS = 5.0

    def __init__(self, settings: WorkerSettings) -> None:
        self._step_limit = settings.engine_timeout_seconds
        self._load_limit = max(settings.load_timeout_seconds, settings.engine_timeout_seconds)
        self._last_look = time.monotonic()
        self._num_steps = 0
        self._stalled = 0.0
        self._is_row = False  # what hangs is a row's preparation
        self._held_up: dict[object, float] = {}  # seconds for which each has been seen
        self._arm_at = 0.0

    def is_hung(self, num_steps: int, has_work: bool, held_up: Iterable[object] = ()) -> bool:
        """Look once. Loading and the first step (compilation) have the longer limit.

        ``held_up``: rows that are being prepared. One may hang while others are computed.
        """
        now = time.monotonic()
        look, self._last_look = min(now - self._last_look, self.LONGEST_LOOK_SECONDS), now
        self._held_up = {row: self._held_up.get(row, -look) + look for row in held_up}
        longest = max(self._held_up.values(), default=0.0)
        self._is_row = longest > self._step_limit
        if self._is_row:
            self._stalled = longest
            return True
        if not has_work or num_steps != self._num_steps:
            self._num_steps = num_steps
            self._stalled = 0.0
            return False
        self._stalled += look
        return self._stalled > (self._step_limit if num_steps else self._load_limit)

    def arm(self) -> None:
        """Have a separate thread write all stacks if the main thread does not look in time.

        That happens when a hanging call does not release the interpreter. Nothing more can be done
        then: the process stays, its leases lapse, and its jobs go back.
        """
        now = time.monotonic()
        if now >= self._arm_at:
            faulthandler.dump_traceback_later(1.25 * self._step_limit, file=sys.__stderr__ or 2)
            self._arm_at = now + 0.25 * self._step_limit

    def disarm(self) -> None:
        """Stop: no look will follow."""
        faulthandler.cancel_dump_traceback_later()

    def dump(self, report: str, job_ids: Sequence[str]) -> None:
        """Log the engine's state, and write every thread's stack to standard error.

        Only ids of jobs are written, never their content.
        """
        log.critical(
            "%s for %.0f s; its stacks are on standard error",
            "a row has been in preparation" if self._is_row else "the engine has made no step",
            self._stalled,
        )
        log.critical("the engine: %s", report)
        log.critical("%d jobs go back: %s", len(job_ids), ", ".join(job_ids) or "none")
        faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
