"""Detects steps of the server's clock with a monotonic clock.

Leases end by the server's clock. When it is set forward by more than a lease, or the server's Mac
wakes up, all leases seem to have lapsed, those of living workers as well.
"""

from __future__ import annotations

import time

TOLERANCE_SECONDS = 3.0  # a slow answer of the server is no step


class ServerClock:
    """Compares each time of the server with the one before, seen by this process."""

    def __init__(self, grace_seconds: float) -> None:
        self._grace = grace_seconds
        self._seen: tuple[float, float] | None = None  # the server's time, and monotonic seconds
        self._trusted_at = 0.0  # monotonic seconds

    def trusts(self, server_now: float) -> bool:
        """Whether leases that have lapsed by this time of the server count as lapsed.

        For ``grace_seconds`` after a step they do not: living workers renew theirs meanwhile.
        """
        now = time.monotonic()
        if self._seen is not None:
            step = server_now - self._seen[0] - (now - self._seen[1])
            if step > TOLERANCE_SECONDS:
                self._trusted_at = now + self._grace
        self._seen = (server_now, now)
        return now >= self._trusted_at
