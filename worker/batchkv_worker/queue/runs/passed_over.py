"""Jobs of the queue that other workers must compute, as this worker's pulls have met them.

They must not keep it from its own jobs, nor keep it busy. It looks through all of them once, then
again each second, or less often where looking means moving many entries of the queue's lists.
"""

from __future__ import annotations

from collections.abc import Sequence

from batchkv_producer.wire.transitions import Run

UNFIT_SECONDS = 1.0  # how soon to ask again when all waiting jobs are for other workers
BARREN_SECONDS = 5.0  # how long a worker is away after it has found only jobs for others
MAX_BARREN_SECONDS = 80.0  # the same, doubled each time that it happens again
MAX_UNFIT_SECONDS = 30.0  # the same, doubled each time, where entries were moved


class PassedOver:
    """Counts the jobs for others, by priority."""

    def __init__(self) -> None:
        self._unfit: tuple[int, ...] = (0, 0, 0)  # entries of the queue's lists, by priority
        self._seen: tuple[int, ...] = (0, 0, 0)  # the same, counted by a look that is not over yet
        self._seconds = UNFIT_SECONDS
        self._barren_until = 0.0  # monotonic seconds
        self._barren_seconds = BARREN_SECONDS

    def note_barren(self, run: Run, now: float) -> None:
        """A pull has brought jobs, or has seen nothing but jobs for others."""
        if run.jobs:
            self._barren_until, self._barren_seconds = 0.0, BARREN_SECONDS
        elif self.are_all_others(run) and now >= self._barren_until:
            self._barren_until = now + self._barren_seconds
            self._barren_seconds = min(2 * self._barren_seconds, MAX_BARREN_SECONDS)

    def is_barren(self, lengths: Sequence[int], now: float) -> bool:
        """Whether other workers should leave no jobs to this one.

        All that wait are for others, or it has found only such jobs a while ago. Those may be with
        another worker now. If that one gave them back for this one, they would go back and forth.
        """
        return now < self._barren_until or (any(lengths) and not any(self.ours(lengths)))

    def ours(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """The lengths of the queue's lists, less the jobs that are known to be for others."""
        pairs = zip(lengths, self._unfit, strict=True)
        return tuple(max(0, length - unfit) for length, unfit in pairs)

    def note(self, run: Run) -> None:
        """Count the jobs that a pull has seen. Many jobs are seen part by part."""
        pairs = zip(self._seen, run.unfit, strict=True)
        seen = tuple(old * run.has_more + new for old, new in pairs)
        # Until the look is over the former count still holds. Otherwise a backlog would be given
        # back for jobs of others each time that a look at many of them begins.
        known = map(max, seen, self._unfit) if run.has_more else seen
        self._unfit = tuple(map(min, known, run.lengths))
        self._seen = tuple(map(min, seen, run.lengths))
        if run.jobs:
            self._seconds = UNFIT_SECONDS

    def may_find_more(self, run: Run) -> bool:
        """Whether jobs for this worker may follow those for others that have been seen."""
        return run.has_more and self._seen != run.lengths

    def are_all_others(self, run: Run) -> bool:
        """Whether a pull brought nothing because the jobs that it saw are for others."""
        may_go_on = self.may_find_more(run) and not run.num_passed
        return any(self._unfit) and not may_go_on

    def pause(self, run: Run, usual_seconds: float) -> float:
        """How long to wait after a pull that brought nothing, in seconds."""
        if self.may_find_more(run) and not run.num_passed:
            return 0.0
        if not self.are_all_others(run):
            return usual_seconds
        seconds = self._seconds
        if run.has_more:
            self._seconds = min(2 * seconds, MAX_UNFIT_SECONDS)
            self._seen = (0, 0, 0)  # the next look starts again
        return usual_seconds if run.num_passed else seconds

    def is_news(self, before: Sequence[int], lengths: Sequence[int]) -> bool:
        """Whether the queue has grown during a long pause: new jobs may be for this worker."""
        has_grown = any(new > old for old, new in zip(before, lengths, strict=True))
        if not has_grown or self._seconds == UNFIT_SECONDS:
            return False
        self._seconds = UNFIT_SECONDS
        return True
