"""Rows of the queue that other workers must compute, as this one's pulls have met them.

They must neither keep it from its own rows nor busy: it looks through all of them once, then again
each second, or less often where looking means moving many entries of the queue's lists.
"""

from __future__ import annotations

from collections.abc import Sequence

from batchkv_producer.wire.transitions import Run
from batchkv_worker.engine.thread import EngineThread
from batchkv_worker.queue.background import Beside
from batchkv_worker.queue.model_watch import ModelWatch

UNFIT_SECONDS = 1.0  # how soon to ask again when all that waits is for other workers
MAX_UNFIT_SECONDS = 30.0  # the same, doubled each time, where entries were moved


class Passing:
    """What is known of others' rows."""

    def __init__(self, engine: EngineThread, beside: Beside) -> None:
        self._unfit: tuple[int, ...] = (0, 0, 0)  # entries of the queue's lists, by priority
        self._seen: tuple[int, ...] = (0, 0, 0)  # of these, by a look that is not over yet
        self._seconds = UNFIT_SECONDS
        self._model_watch = ModelWatch(engine, beside)

    @property
    def is_outdated(self) -> bool:
        """Whether the model on the disk is another now: the worker is to be started again."""
        return self._model_watch.is_outdated

    def ours(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """The lengths of the queue's lists, less what is known to be for others."""
        pairs = zip(lengths, self._unfit, strict=True)
        return tuple(max(0, length - unfit) for length, unfit in pairs)

    def note(self, run: Run) -> None:
        """What a pull has seen; many rows are seen part by part."""
        pairs = zip(self._seen, run.unfit, strict=True)
        seen = tuple(old * run.has_more + new for old, new in pairs)
        # What was known before the look is over still holds, or a backlog would be given back for
        # rows of others each time that a look at many of them begins.
        known = map(max, seen, self._unfit) if run.has_more else seen
        self._unfit = tuple(map(min, known, run.lengths))
        self._seen = tuple(map(min, seen, run.lengths))
        if run.jobs:
            self._seconds = UNFIT_SECONDS

    def may_find_more(self, run: Run) -> bool:
        """Whether rows of ours may stand behind those of others that have been seen."""
        return run.has_more and self._seen != run.lengths

    def pause(self, run: Run, usual_seconds: float) -> float:
        """How long to wait after a pull that brought nothing, in seconds."""
        if self.may_find_more(run) and not run.num_passed:
            return 0.0
        if not any(self._unfit):
            return usual_seconds
        self._model_watch.look()
        seconds = self._seconds
        if run.has_more:
            self._seconds = min(2 * seconds, MAX_UNFIT_SECONDS)
            self._seen = (0, 0, 0)  # the next look begins anew
        return usual_seconds if run.num_passed else seconds

    def is_news(self, before: Sequence[int], lengths: Sequence[int]) -> bool:
        """Whether the queue has grown while we wait for long: what is new may be ours."""
        has_grown = any(new > old for old, new in zip(before, lengths, strict=True))
        if not has_grown or self._seconds == UNFIT_SECONDS:
            return False
        self._seconds = UNFIT_SECONDS
        return True
