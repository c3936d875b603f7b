"""The server's clock, watched with one that never steps.

Leases end by the server's clock. When somebody sets it forward by more than a lease, or the Mac on
which the server runs wakes up, all leases seem to have lapsed, those of living workers as well.
"""

from __future__ import annotations

import time

TOLERANCE_SECONDS = 3.0  # a server that is slow to answer is no step


class ServerClock:
    """Knows when the server's clock has stepped forward, as far as this process has seen it."""

    def __init__(self, grace_seconds: float) -> None:
        self._grace = grace_seconds
        self._seen: tuple[float, float] | None = None  # the server's clock, and ours
        self._trusted_at = 0.0  # monotonic seconds

    def trusts(self, server_now: float) -> bool:
        """Whether leases that have lapsed by this time of the server are to be believed.

        Not for ``grace_seconds`` after a step: whoever lives renews its leases within them.
        """
        now = time.monotonic()
        if self._seen is not None:
            step = server_now - self._seen[0] - (now - self._seen[1])
            if step > TOLERANCE_SECONDS:
                self._trusted_at = now + self._grace
        self._seen = (server_now, now)
        return now >= self._trusted_at
