"""A circuit breaker: after several failures a tier is not called for a while.

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
    """Decides whether a tier may be called now. Times are seconds of ``clock``.

    Threads may share a breaker.
    """

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
        self._next_call_at: float | None = None  # None: closed

    @property
    def is_closed(self) -> bool:
        """Whether the tier is in normal use."""
        return self._next_call_at is None

    @property
    def is_cooling_down(self) -> bool:
        """Whether ``may_call`` would return False now."""
        with self._lock:
            return self._next_call_at is not None and self._clock() < self._next_call_at

    def may_call(self) -> bool:
        """Whether the tier may be called now. While the breaker is open, True allows one probe."""
        with self._lock:
            if self._next_call_at is None:
                return True
            now = self._clock()
            if now < self._next_call_at:
                return False
            # If the probe never reports its result (its thread died), the next one may come later.
            self._next_call_at = now + self._cooldown_seconds
            return True

    def succeeded(self) -> None:
        """Record a call that succeeded."""
        with self._lock:
            self._num_failures = 0
            self._cooldown_seconds = self._first_cooldown_seconds
            self._next_call_at = None

    def failed(self) -> None:
        """Record a call that failed."""
        with self._lock:
            self._num_failures += 1
            is_probe = self._next_call_at is not None
            if not is_probe and self._num_failures < self._max_failures:
                return
            if is_probe:
                self._cooldown_seconds = min(2 * self._cooldown_seconds, self._max_cooldown_seconds)
            self._next_call_at = self._clock() + self._cooldown_seconds
