"""How fast each worker of a queue is, and how much of the queue's work each of them should hold.

Work is counted in prompt tokens. A generated token counts as ``TOKENS_PER_GENERATED`` of them. Each
worker tells the others its ``Pace`` about once a second. A worker that tells nothing (of an older
version, or not for long) counts as one of average speed that holds nothing. No Redis here.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from batchkv_producer.agreed import DEFAULT_MAX_TOKENS
from batchkv_producer.order.prefix_order import TOKENS_PER_GENERATED

MOST_ROWS = 256  # of those seen last, from which means are made
MIN_BUSY_SECONDS = 1.0  # of work before a speed is known
HALF_LIFE_SECONDS = 120.0  # of what was measured, in seconds of work
TELL_SECONDS = 1.0  # how often a worker tells its pace, at least
MUTE_SECONDS = 5.0  # without a new pace, after which a worker is away
FIRST_ANSWER_TOKENS = 128  # of a row, before any has ended
FEW_JOBS = 20  # for each worker, up to which whole jobs are counted
_MAX = 1e15  # a larger number in Redis is a fault


@dataclass(frozen=True, slots=True)
class Pace:
    """One worker as the others see it.

    ``speed``: work a second; 0 while it is not known. ``held``: the work that it holds, of rows
    that have not begun, and half of what rows in slots have left to generate at most.
    ``is_away``: it takes no rows now. ``free_slots``: rows that it could begin at once.
    ``beat``: another number each time, so that a worker that has died is noticed. ``answer``: the
    mean of the tokens that its rows generated; 0 before one has ended.
    """

    speed: float = 0.0
    held: float = 0.0
    is_away: bool = False
    free_slots: int = 0
    beat: int = 0
    answer: float = 0.0

    def later(self, seconds: float) -> Pace:
        """As it is so many seconds after it was told, if it has taken no jobs since.

        A worker with free slots computes less than its speed, so nothing is assumed of it.
        """
        if self.free_slots or self.is_away:
            return self
        return replace(self, held=max(0.0, self.held - self.speed * seconds))

    def encode(self) -> str:
        """As it is stored: the fields in their order, between blanks."""
        numbers = f"{int(self.is_away)} {self.free_slots} {self.beat} {self.answer:.1f}"
        return f"{self.speed:.1f} {self.held:.0f} {numbers}"


def decode_pace(text: str) -> Pace | None:
    """A stored pace; None for any other text."""
    words = text.split(" ")
    if len(text) > 100 or len(words) != 6 or words[2] not in ("0", "1"):
        return None
    try:
        speed, held, answer = float(words[0]), float(words[1]), float(words[5])
        free_slots, beat = int(words[3]), int(words[4])
    except ValueError:
        return None
    numbers = (speed, held, free_slots, beat, answer)
    is_sound = all(0 <= number <= _MAX for number in numbers)  # NaN is not
    return Pace(speed, held, words[2] == "1", free_slots, beat, answer) if is_sound else None


@dataclass(frozen=True, slots=True)
class Crowd:
    """The workers of one queue. ``own`` is this one; ``others`` told their pace.

    ``num_silent`` are the other workers that told none.
    """

    own: Pace = Pace()
    others: tuple[Pace, ...] = ()
    num_silent: int = 0

    @property
    def num_workers(self) -> int:
        """All workers, this one too."""
        return 1 + len(self.others) + self.num_silent

    @property
    def usual_speed(self) -> float:
        """The speed of a worker whose speed is not known: the mean of the known ones, or 1."""
        known = [pace.speed for pace in (self.own, *self.others) if pace.speed > 0]
        return sum(known) / len(known) if known else 1.0

    @property
    def is_known(self) -> bool:
        """Whether any speed is known. If not, a worker's speed is 1 and seconds mean nothing."""
        return any(pace.speed > 0 for pace in (self.own, *self.others))

    def speed_of(self, pace: Pace) -> float:
        """Its speed, or the usual one."""
        return pace.speed or self.usual_speed

    @property
    def own_speed(self) -> float:
        return self.speed_of(self.own)

    @property
    def has_free_slots(self) -> bool:
        """Whether another worker says that it could begin rows at once."""
        return any(pace.free_slots > 0 and not pace.is_away for pace in self.others)

    def later(self, seconds: float) -> Crowd:
        """The crowd if the others told their pace so many seconds earlier."""
        return replace(self, others=tuple(pace.later(seconds) for pace in self.others))

    def without_idlers(self) -> Crowd:
        """The crowd if nothing is left to those who could begin rows at once and take none."""
        others = (
            replace(pace, is_away=pace.is_away or pace.free_slots > 0) for pace in self.others
        )
        return replace(self, others=tuple(others))

    @property
    def present(self) -> list[Pace]:
        """The other workers that take rows."""
        told = [pace for pace in self.others if not pace.is_away]
        return [*told, *(Pace() for _ in range(self.num_silent))]

    @property
    def total_speed(self) -> float:
        return self.own_speed + sum(self.speed_of(pace) for pace in self.present)

    @property
    def top_speed(self) -> float:
        return max(self.own_speed, *(self.speed_of(pace) for pace in self.present), 0.0)

    def lateness(self, pace: Pace, row_seconds: float) -> float:
        """How much longer a row takes there than on the fastest worker, in seconds.

        ``row_seconds``: how long it takes on the own one.
        """
        if not self.is_known:
            return 0.0
        return row_seconds * self.own_speed * (1 / self.speed_of(pace) - 1 / self.top_speed)

    def seconds_left(
        self, queued_work: float, job_work: float = 0.0, row_seconds: float = 0.0
    ) -> float:
        """The time until all work is done, if every worker has its share by speed.

        A worker on which a row takes longer ends earlier by so much. ``job_work``: the work of a
        job, which one worker does as a whole.
        """
        work = queued_work + self.own.held + sum(pace.held for pace in self.others)
        workers = [
            (self.lateness(pace, row_seconds), self.speed_of(pace))
            for pace in (self.own, *self.present)
        ]
        return _common_end(sorted(workers), work, job_work)

    def has_hungry(self, seconds: float) -> bool:
        """Whether another worker holds less than its share of so many seconds of work."""
        return any(pace.held < self.speed_of(pace) * seconds for pace in self.present)

    @property
    def answer(self) -> float:
        """The mean of the tokens of answers, as the others say; 0 if none knows any."""
        known = [pace.answer for pace in self.others if pace.answer > 0]
        return sum(known) / len(known) if known else 0.0


def _common_end(workers: Sequence[tuple[float, float]], work: float, job_work: float) -> float:
    """When (lateness, speed) workers are done together, the least late first; in seconds.

    With few jobs for each worker, whole jobs count: the moment by which as many can be done.
    """
    if work <= 0:
        return 0.0
    end, speeds, lost = math.inf, 0.0, 0.0
    for late, speed in workers:
        if late >= end:
            break
        speeds, lost = speeds + speed, lost + late * speed
        end = (work + lost) / speeds
    num_missing = round(work / job_work) if job_work > 0 else 0
    if not 0 < num_missing <= FEW_JOBS * len(workers):
        return end
    ends = []  # of the next job of each worker
    for late, speed in workers:
        num_done = max(0, math.floor((end - late) * speed / job_work + 1e-6))
        num_missing -= num_done
        ends.append((late + (num_done + 1) * job_work / speed, job_work / speed))
    heapq.heapify(ends)
    for _ in range(num_missing):
        end, seconds = ends[0]
        heapq.heapreplace(ends, (end + seconds, seconds))
    return end


def crowd_of(
    own: str,
    pace: Pace,
    told: Mapping[str, str],
    workers: Iterable[str],
    beats: Beats | None = None,
    now: float = 0.0,
) -> Crowd:
    """The crowd of a worker called ``own``. ``told``: texts by name, ``workers``: all names.

    ``beats`` knows since when each has told that. Those that are mute are away, whatever they told
    last. The others have computed since.
    """
    names = {*workers} - {own}
    found = {name: decode_pace(told[name]) for name in names & told.keys()}
    gone, ages = (beats.mute(now), beats.ages(now)) if beats else (set(), {})
    others = tuple(
        replace(each, is_away=True) if name in gone else each.later(ages.get(name, 0.0))
        for name, each in sorted(found.items())
        if each is not None
    )
    return Crowd(pace, others, len(names) - len(others))


@dataclass(frozen=True, slots=True)
class _Told:
    """A text, when it was seen first, and when the worker had told it, as far as is known."""

    text: str
    seen_at: float
    told_at: float


class Beats:
    """When each of the other workers told something new. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._last: dict[str, _Told] = {}
        self._looked_at = math.inf

    def note(self, told: Mapping[str, str], now: float) -> None:
        """What all have told by now.

        What is new was told since the last look, and in the last second: in the middle, on average.
        """
        told_at = now - min(TELL_SECONDS, max(0.0, now - self._looked_at)) / 2
        old = {name: last for name, last in self._last.items() if told.get(name) == last.text}
        self._last = {name: old.get(name, _Told(text, now, told_at)) for name, text in told.items()}
        self._looked_at = now

    def mute(self, now: float) -> set[str]:
        """Those that have told nothing new for ``MUTE_SECONDS``."""
        return {name for name, last in self._last.items() if now - last.seen_at >= MUTE_SECONDS}

    def ages(self, now: float) -> dict[str, float]:
        """For how many seconds each has told the same."""
        return {name: now - last.told_at for name, last in self._last.items()}


class _Recent:
    """The mean of the last ``MOST_ROWS`` numbers."""

    def __init__(self) -> None:
        self._numbers: deque[float] = deque()
        self._sum = 0.0

    def add(self, number: float) -> None:
        self._sum += number
        self._numbers.append(number)
        if len(self._numbers) > MOST_ROWS:
            self._sum -= self._numbers.popleft()

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def mean(self) -> float:
        """0 if there is none."""
        return max(0.0, self._sum) / len(self._numbers) if self._numbers else 0.0


class Meter:
    """Measures one worker: its speed, and the work of the rows that it begins and ends."""

    def __init__(self) -> None:
        self._work = self._seconds = 0.0  # measured, old values fading
        self._begun = 0.0  # jobs computed at once, times seconds; the same
        self._prompts = _Recent()  # tokens that are not shared
        self._limits = _Recent()  # tokens that rows may generate
        self._answers = _Recent()  # generated tokens
        self.told_answer = 0.0  # the mean of other workers; 0 if it is not known

    def add_answer(self, generated: int) -> None:
        """A row has ended well, with so many tokens."""
        self._answers.add(generated)

    def add_computed(self, prompt: int, generated: int, seconds: float, num_begun: float) -> None:
        """So many tokens of prompts were computed and so many generated, in so many seconds.

        About ``num_begun`` jobs were computed at once. To be called only for times in which the
        worker had as many rows as it could compute: with fewer it is slower than it could be.
        """
        fade = 0.5 ** (seconds / HALF_LIFE_SECONDS)
        new = prompt + TOKENS_PER_GENERATED * generated
        self._work, self._seconds = self._work * fade + new, self._seconds * fade + seconds
        self._begun = self._begun * fade + num_begun * seconds

    def add_begun(self, prompt_work: float, most_generated: int | None = None) -> None:
        """A row has started: its prompt is so much work, and it may generate so many tokens."""
        self._prompts.add(prompt_work)
        self._limits.add(DEFAULT_MAX_TOKENS if most_generated is None else most_generated)

    @property
    def speed(self) -> float:
        """Work a second; 0 while it is not known.

        A worker that has done nothing that could be counted is at least as slow as one job.
        """
        if self._seconds < MIN_BUSY_SECONDS:
            return 0.0
        return (self._work or self.job_work) / self._seconds

    @property
    def answer(self) -> float:
        """The mean of the tokens that rows generated; 0 before one has ended."""
        return self._answers.mean

    @property
    def answer_work(self) -> float:
        """What generating a row's answer costs, on average."""
        tokens = self.answer or self.told_answer or FIRST_ANSWER_TOKENS
        if self._limits:
            tokens = min(tokens, max(1.0, self._limits.mean))
        return TOKENS_PER_GENERATED * tokens

    @property
    def job_work(self) -> float:
        """The whole work of a job, on average."""
        return self._prompts.mean + self.answer_work

    @property
    def row_seconds(self) -> float:
        """How long a row is computed here, from its first token to its end; 0 if not known.

        By Little's law: jobs at once, over jobs a second.
        """
        return self._begun / self._seconds * self.job_work / self.speed if self.speed else 0.0
