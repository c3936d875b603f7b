"""Which of a worker's queues has its turn. Pure.

A worker with adapters has a queue for the model alone and one for each adapter. Its engine serves
one of them at a time. It serves the queue whose first job has the highest priority, and among
several that whose first job is of the oldest batch. So batches run in the order in which they were
submitted, whatever their adapters. A pull takes a run of consecutive jobs of one queue, so the last
run may have some of a later batch. None waits for ever, because those before it come to an end.

Entries that the last pull of a queue could not take are for other workers. Such a queue waits for
some seconds before it counts again, longer each time, because each exchange of adapters costs time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

BARREN_SECONDS = 5.0
MAX_BARREN_SECONDS = 80.0


@dataclass(frozen=True, slots=True)
class Head:
    """The first job that waits in a queue: the rank of its priority, and its batch's creation.

    ``rank`` is an index in ``redis_keys.PRIORITIES``. ``created``: seconds since 1970 by the
    server's clock; 0 is not known.
    """

    rank: int
    created: float


class QueueTurns:
    """The queue that is served, and what is known of the others. Times are monotonic seconds."""

    def __init__(self, queues: Sequence[str]) -> None:
        self.queues = tuple(queues)
        self.current = self.queues[0]
        self._pauses: dict[str, float] = {}  # of queues that were barren, in seconds
        self._barren_until: dict[str, float] = {}

    @property
    def are_several(self) -> bool:
        """Whether there is more than one queue."""
        return len(self.queues) > 1

    def note_pull(self, *, has_jobs: bool, has_entries: bool, now: float) -> None:
        """A pull from the current queue brought jobs, or none although it had entries."""
        if has_jobs:
            self._pauses.pop(self.current, None)
            self._barren_until.pop(self.current, None)
        elif has_entries and now >= self._barren_until.get(self.current, 0.0):
            pause = self._pauses.get(self.current, BARREN_SECONDS)
            self._barren_until[self.current] = now + pause
            self._pauses[self.current] = min(2 * pause, MAX_BARREN_SECONDS)

    def choose(self, heads: Mapping[str, Head], now: float) -> str:
        """The queue to serve next. ``heads`` lacks the empty queues."""
        waiting = [
            (head.rank, head.created, queue != self.current, place, queue)
            for place, queue in enumerate(self.queues)
            if (head := heads.get(queue)) and now >= self._barren_until.get(queue, 0.0)
        ]
        return min(waiting)[-1] if waiting else self.current
