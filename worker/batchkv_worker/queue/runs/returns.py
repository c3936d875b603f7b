"""Jobs that a worker gives back because others should do them: when, and which. No Redis here.

Rows are not to go back and forth. What others have told may be a moment old: a worker gives jobs
back only if it has had too many for a while, and takes none for a while after that. A row that has
begun goes back once. Times are monotonic seconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

from batchkv_producer.wire.transitions import JobLease

SETTLE_SECONDS = 0.3  # for which there are too many jobs before some go back
COOL_SECONDS = 2.0  # for which a worker that has given jobs back takes none
MOST_REMEMBERED = 1000  # ids


class Returns:
    """What one worker has given back."""

    def __init__(self) -> None:
        self._ids: deque[str] = deque(maxlen=MOST_REMEMBERED)
        self._since = math.inf  # when there began to be too many jobs
        self._cool_until = -math.inf

    def look(self, now: float, *, has_surplus: bool) -> None:
        """There are too many jobs now, or not."""
        self._since = min(self._since, now) if has_surplus else math.inf

    def is_sure(self, now: float) -> bool:
        """Whether there have been too many jobs for a while."""
        return now - self._since >= SETTLE_SECONDS

    def is_cooling(self, now: float) -> bool:
        """Whether jobs were given back a moment ago."""
        return now < self._cool_until

    def note_taken(self) -> None:
        """Jobs were taken. The others do not know it yet."""
        self._since = math.inf

    def note(self, leases: Iterable[JobLease], now: float) -> None:
        """These go back."""
        self._ids.extend(lease.job_id for lease in leases)
        self._cool_until = now + COOL_SECONDS

    def fresh(self, leases: Sequence[JobLease]) -> list[JobLease]:
        """Those that were not given back before."""
        known = {*self._ids}
        return [lease for lease in leases if lease.job_id not in known]
