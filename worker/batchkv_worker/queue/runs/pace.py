"""How fast each worker of a queue is, and how much of the queue's work each of them should hold.

Work is counted in prompt tokens. A generated token counts as ``TOKENS_PER_GENERATED`` of them. Each
worker tells the others its ``Pace`` about once a second. A worker that tells nothing (of an older
version, or not for long) counts as one of average speed that holds nothing. No Redis here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from batchkv_producer.order.prefix_order import BYTES_PER_TOKEN, TOKENS_PER_GENERATED

MOST_ROWS = 256  # of those seen last, from which means are made
MIN_BUSY_SECONDS = 2.0  # of work before a speed is known
HALF_LIFE_SECONDS = 120.0  # of what was measured, in seconds of work
MUTE_SECONDS = 5.0  # without a new pace, after which a worker is away; it tells one each second
FIRST_ANSWER_TOKENS = 128  # of a row, before any has ended
_MAX = 1e15  # a larger number in Redis is a fault


@dataclass(frozen=True, slots=True)
class Pace:
    """One worker as the others see it.

    ``speed``: work a second; 0 while it is not known. ``held``: the work that it holds, of rows
    that have not begun, and half of what rows in slots have left to generate at most.
    ``is_away``: it takes no rows now. ``free_slots``: rows that it could begin at once.
    ``beat``: another number each time, so that a worker that has died is noticed.
    """

    speed: float = 0.0
    held: float = 0.0
    is_away: bool = False
    free_slots: int = 0
    beat: int = 0

    def encode(self) -> str:
        """As it is stored: speed, held work, 1 if it is away, free slots, beat, between blanks."""
        return f"{self.speed:.1f} {self.held:.0f} {int(self.is_away)} {self.free_slots} {self.beat}"


def decode_pace(text: str) -> Pace | None:
    """A stored pace; None for any other text."""
    words = text.split(" ")
    if len(text) > 80 or len(words) not in (4, 5) or words[2] not in ("0", "1"):
        return None
    try:
        speed, held, free_slots = float(words[0]), float(words[1]), int(words[3])
        beat = int(words[4]) if len(words) > 4 else 0
    except ValueError:
        return None
    numbers = (speed, held, free_slots, beat)
    is_sound = all(0 <= number <= _MAX for number in numbers)  # NaN is not
    return Pace(speed, held, words[2] == "1", free_slots, beat) if is_sound else None


@dataclass(frozen=True, slots=True)
class Crowd:
    """The workers of one queue. ``own`` is this one; ``others`` told their pace.

    ``num_silent`` are the other workers that told none.
    """

    own: Pace = Pace()
    others: tuple[Pace, ...] = ()
    num_silent: int = 0

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

    def seconds_left(self, queued_work: float) -> float:
        """The time until all work is done, if every worker has its share by speed."""
        held = self.own.held + sum(pace.held for pace in self.others)
        return (queued_work + held) / self.total_speed

    def has_hungry(self, seconds: float) -> bool:
        """Whether another worker holds less than its share of so many seconds of work."""
        return any(pace.held < self.speed_of(pace) * seconds for pace in self.present)


def crowd_of(
    own: str,
    pace: Pace,
    told: Mapping[str, str],
    workers: Iterable[str],
    mute: Iterable[str] = (),
) -> Crowd:
    """The crowd of a worker called ``own``. ``told``: texts by name, ``workers``: all names.

    Those that are ``mute`` tell nothing new: they are away, whatever they told last.
    """
    names = {*workers} - {own}
    found = {name: decode_pace(told[name]) for name in names & told.keys()}
    gone = {*mute}
    others = tuple(
        replace(each, is_away=True) if name in gone else each
        for name, each in sorted(found.items())
        if each is not None
    )
    return Crowd(pace, others, len(names) - len(others))


class Beats:
    """When each of the other workers told something new. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[str, float]] = {}

    def note(self, told: Mapping[str, str], now: float) -> None:
        """What all have told by now."""
        old = {name: found for name, found in self._last.items() if told.get(name) == found[0]}
        self._last = {name: old.get(name, (text, now)) for name, text in told.items()}

    def mute(self, now: float) -> set[str]:
        """Those that have told nothing new for ``MUTE_SECONDS``."""
        return {name for name, (_, at) in self._last.items() if now - at >= MUTE_SECONDS}


class Meter:
    """Measures one worker: its speed, and the work of the rows that it pulls and ends."""

    def __init__(self) -> None:
        self._work = self._seconds = 0.0  # measured, old values fading
        self._pulled: deque[float] = deque(maxlen=MOST_ROWS)  # prompt tokens not shared
        self._answers: deque[int] = deque(maxlen=MOST_ROWS)  # generated tokens
        self._row_seconds = 0.0

    def add_answer(self, generated: int) -> None:
        """A row has ended well, with so many tokens."""
        self._answers.append(generated)

    def add_computed(self, prompt: int, generated: int, seconds: float, num_begun: float) -> None:
        """So many tokens of prompts were computed and so many generated, in so many seconds.

        About ``num_begun`` jobs were computed at once. To be called only for times in which the
        worker had as many rows as it could compute: with fewer it is slower than it could be.
        """
        fade = 0.5 ** (seconds / HALF_LIFE_SECONDS)
        new = prompt + TOKENS_PER_GENERATED * generated
        self._work, self._seconds = self._work * fade + new, self._seconds * fade + seconds
        if self.speed:  # Little's law: jobs at once, over jobs a second
            row = num_begun * self.job_work / self.speed
            self._row_seconds = max(row, self._row_seconds * fade)

    def add_pulled(self, prompt_work: float) -> None:
        """A job was pulled, whose prompt is so much work."""
        self._pulled.append(prompt_work)

    @property
    def speed(self) -> float:
        """Work a second; 0 while it is not known."""
        return self._work / self._seconds if self._seconds >= MIN_BUSY_SECONDS else 0.0

    @property
    def answer_work(self) -> float:
        """What generating a row's answer costs, on average."""
        tokens = sum(self._answers) / len(self._answers) if self._answers else FIRST_ANSWER_TOKENS
        return TOKENS_PER_GENERATED * tokens

    @property
    def job_work(self) -> float:
        """The whole work of a job, on average."""
        prompts = sum(self._pulled) / len(self._pulled) if self._pulled else 0.0
        return prompts + self.answer_work

    @property
    def row_seconds(self) -> float:
        """How long a row is computed here, from its first token to its end; 0 if not known."""
        return self._row_seconds


def prompt_work(num_bytes: int, shared_bytes: int | None) -> float:
    """The work of a prompt of so many bytes, if what it shares is computed already."""
    return max(1, math.ceil((num_bytes - (shared_bytes or 0)) / BYTES_PER_TOKEN))
