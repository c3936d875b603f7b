"""A circuit breaker: a tier that keeps failing is left alone for a while.

::

    closed ── several failures in a row ──► open ── cooldown over ──► half open (one call)
      ▲                                      ▲                          │            │
      └────────────── success ───────────────┼──────────────────────────┘            │
                                             └── failure: twice the cooldown ────────┘
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Breaker:
    """Whether a tier may be asked now. Times are seconds of ``clock``; safe to share by threads."""

    def __init__(
        self,
        max_failures: int = 3,
        cooldown_seconds: float = 5.0,
        max_cooldown_seconds: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_failures = max_failures
        self._first_cooldown_seconds = cooldown_seconds
        self._max_cooldown_seconds = max_cooldown_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._num_failures = 0
        self._cooldown_seconds = cooldown_seconds
        self._ask_again_at: float | None = None  # None: closed

    @property
    def is_closed(self) -> bool:
        """Is the tier in ordinary use?"""
        return self._ask_again_at is None

    @property
    def is_resting(self) -> bool:
        """Would nobody be told now that the tier may be asked?"""
        with self._lock:
            return self._ask_again_at is not None and self._clock() < self._ask_again_at

    def may_ask(self) -> bool:
        """May the tier be asked? Whoever is told so while it is open makes the one probe."""
        with self._lock:
            if self._ask_again_at is None:
                return True
            now = self._clock()
            if now < self._ask_again_at:
                return False
            # A probe that never reports (its thread died) must not keep the breaker open for ever.
            self._ask_again_at = now + self._cooldown_seconds
            return True

    def succeeded(self) -> None:
        """The tier did what it was asked."""
        with self._lock:
            self._num_failures = 0
            self._cooldown_seconds = self._first_cooldown_seconds
            self._ask_again_at = None

    def failed(self) -> None:
        """The tier did not."""
        with self._lock:
            self._num_failures += 1
            is_probe = self._ask_again_at is not None
            if not is_probe and self._num_failures < self._max_failures:
                return
            if is_probe:
                self._cooldown_seconds = min(2 * self._cooldown_seconds, self._max_cooldown_seconds)
            self._ask_again_at = self._clock() + self._cooldown_seconds
