"""Models that a host leaves alone for a while: refused, dead, or without a row that it may take.

Times are monotonic seconds. Each kind of setback lasts longer every time, until a row is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

from batchkv_worker.errors import EXIT_ENGINE_DIED, EXIT_MODEL_CHANGED, WorkerError

REFUSED_SECONDS = 600.0  # a wrong configuration stays wrong for a while
CHANGED_SECONDS = 1.0  # between two loads, because the files may go on changing
DEATH_SECONDS = 1.0
MAX_DEATH_SECONDS = 60.0
FAILING_DEATHS = 5  # so many without a row, and a host with --burst waits for it no longer
IDLE_SECONDS = 5.0  # a model that is held takes none of its waiting rows for so long
BARREN_SECONDS = 10.0
MAX_BARREN_SECONDS = 600.0


@dataclass(slots=True)
class _Model:
    aside_until: float = 0.0
    num_deaths: int = 0  # since the last row
    is_refused: bool = False
    barren_until: float = 0.0
    barren_seconds: float = BARREN_SECONDS


class Setbacks:
    """What went wrong of late, by model."""

    def __init__(self) -> None:
        self._models: dict[str, _Model] = {}

    def note_end(self, model: str, code: int, now: float) -> float:
        """The process of a model has ended unasked. Returns how long it is not started again."""
        one = self._of(model)
        one.is_refused = code == WorkerError.exit_code
        if code == WorkerError.exit_code:
            pause = REFUSED_SECONDS
        elif code == EXIT_MODEL_CHANGED:
            pause = CHANGED_SECONDS
        else:
            pause = min(DEATH_SECONDS * 2**one.num_deaths, MAX_DEATH_SECONDS)
            one.num_deaths += 1
        one.aside_until = now + pause
        return pause

    def note_ready(self, model: str) -> None:
        """The process of a model has loaded it."""
        self._of(model).is_refused = False

    def note_work(self, model: str) -> None:
        """The process of a model has rows."""
        one = self._of(model)
        one.num_deaths, one.is_refused = 0, False
        one.barren_until, one.barren_seconds = 0.0, BARREN_SECONDS

    def note_idle(self, model: str, idle_seconds: float, now: float) -> None:
        """Rows of a model wait, and its process has been idle for so long: they are not for it."""
        one = self._of(model)
        if idle_seconds < IDLE_SECONDS or now < one.barren_until:
            return
        one.barren_until = now + one.barren_seconds
        one.barren_seconds = min(2 * one.barren_seconds, MAX_BARREN_SECONDS)

    def is_aside(self, model: str, now: float) -> bool:
        """Whether the model is not to be loaded now."""
        return now < self._of(model).aside_until

    def is_barren(self, model: str, now: float) -> bool:
        """Whether the rows that wait count as rows of others."""
        return now < self._of(model).barren_until

    def is_refused(self, model: str) -> bool:
        """Whether its process ended at once, because its configuration is wrong."""
        return self._of(model).is_refused

    def failure(self, model: str) -> int:
        """The exit code of a host that leaves rows of this model, because it cannot be served.

        0: it can, as far as is known. It may have died a few times.
        """
        one = self._of(model)
        if one.is_refused:
            return WorkerError.exit_code
        return EXIT_ENGINE_DIED if one.num_deaths >= FAILING_DEATHS else 0

    def _of(self, model: str) -> _Model:
        return self._models.setdefault(model, _Model())
