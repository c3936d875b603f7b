"""The levels of a training run, and its learning rate. No MLX here."""

from dataclasses import dataclass

from demo_model.batches import Level

CURRICULUM: tuple[Level, ...] = (
    Level(max_facts=4, num_tokens=192, batch_size=512, max_questions=8),
    Level(max_facts=8, num_tokens=256, batch_size=256, max_questions=9),
    Level(max_facts=16, num_tokens=512, batch_size=256, max_questions=16),
    Level(max_facts=32, num_tokens=1024, batch_size=192, max_questions=24),
    Level(max_facts=64, num_tokens=1280, batch_size=128, max_questions=24),
    Level(max_facts=112, num_tokens=2048, batch_size=96, max_questions=32),
)
PROMOTE_AT = 0.9


@dataclass(frozen=True, slots=True)
class Plan:
    """The limits of a run. The first one reached ends it, and both drive the schedules."""

    num_steps: int
    max_seconds: float
    peak_rate: float
    warmup_steps: int

    def progress(self, step: int, seconds: float) -> float:
        """How much of the run is over, 0 to 1."""
        return min(1.0, max(step / self.num_steps, seconds / self.max_seconds))

    def learning_rate(self, step: int, progress: float) -> float:
        """Linear warm-up, flat until half of the run, then linear down to a fiftieth."""
        decay = min(1.0, 2.0 * (1.0 - progress)) * 0.98 + 0.02
        return self.peak_rate * min(1.0, (step + 1) / self.warmup_steps) * decay


class Curriculum:
    """The level that is being learned, and the share of right answers."""

    def __init__(self, levels: tuple[Level, ...], index: int = 0) -> None:
        self._levels = levels
        self.index = index
        self.score = 0.0

    @property
    def level(self) -> Level:
        return self._levels[self.index]

    @property
    def is_last(self) -> bool:
        return self.index == len(self._levels) - 1

    def record(self, level: Level, right: float) -> bool:
        """Add the share of right answers of one batch. Returns True if the next level begins."""
        if level is not self.level:
            return False
        self.score = 0.9 * self.score + 0.1 * right
        if self.is_last or self.score < PROMOTE_AT:
            return False
        self.index, self.score = self.index + 1, 0.0
        return True
