"""What a worker tells the others of its queue about its pace, and what it knows of theirs."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

from batchkv_worker.engine.thread import EngineThread
from batchkv_worker.events import Work
from batchkv_worker.figures.engine import Progress
from batchkv_worker.queue.in_flight import InFlight
from batchkv_worker.queue.runs.pace import Beats, Crowd, Meter, Pace, crowd_of

QUICK_POLL_SECONDS = 0.25  # how often to look if all are soon done or no speed is known
NEWS_SECONDS = 0.1  # after which others are told that this worker has taken jobs, or returned some
END_SECONDS = 5.0  # of work that is left
PATIENCE_SECONDS = 5.0  # how long a slow worker leaves rows to faster ones that take none


class Pacing:
    """One worker's pace at its present queue. Times are monotonic seconds."""

    def __init__(self, name: str, engine: EngineThread, in_flight: InFlight) -> None:
        self._name = name
        self._engine = engine
        self._in_flight = in_flight
        self.meter = Meter()
        self.is_patient = True
        self._others, self._noted_at = Crowd(), 0.0  # as they were at that time
        self._beats = Beats()
        self._num_told = 0
        self._looked_at = time.monotonic()
        self._last = Progress()
        self._has_news = self._is_quick = False
        self._left = (0, 0.0)  # how many jobs this worker leaves to others, and since when

    def _progress(self) -> Progress:
        """The engine's progress; of one that says nothing, what can be known from outside."""
        progress = self._engine.progress()
        if progress is None:
            return Progress(max(0, self._in_flight.num_started - self._engine.num_slots))
        return progress

    def look(self) -> None:
        """Measure what the engine has computed since the last look."""
        now, before, progress = time.monotonic(), self._looked_at, self._progress()
        prompt = progress.num_prompt - self._last.num_prompt
        generated = progress.num_generated - self._last.num_generated
        was_full = self._is_full(self._last) and self._is_full(progress)
        if was_full and prompt >= 0 and generated >= 0:  # else it is another engine
            begun = (progress.num_prefill + progress.num_decode) / self._in_flight.choices
            self.meter.add_computed(prompt, generated, now - before, begun)
        self._last, self._looked_at = progress, now

    def _is_full(self, progress: Progress) -> bool:
        """Whether the engine had as many rows as it could compute."""
        has_prompts = progress.num_waiting > 0 or progress.num_prefill > 0
        return has_prompts or progress.num_decode >= self._engine.num_slots > 0

    def pace(self, *, is_away: bool) -> Pace:
        """This worker's pace now."""
        progress, meter = self._progress(), self.meter
        held = self._in_flight.work_to_begin(progress.num_waiting, meter.answer_work)
        prompts = progress.num_prefill * (meter.job_work + meter.answer_work) / 2
        decode = progress.num_decode * meter.answer_work / 2
        num_free = max(0, self._engine.num_slots - self._in_flight.num_started)
        work = held + prompts + decode
        return Pace(meter.speed, work, is_away, num_free, self._num_told, meter.answer)

    @property
    def num_waiting(self) -> int:
        """Rows that the engine has and has not begun."""
        return min(self._progress().num_waiting, self._in_flight.num_started)

    def crowd(self) -> Crowd:
        """All workers of the queue. What nobody has taken for a while is left to nobody."""
        others = self._others.later(time.monotonic() - self._noted_at)
        crowd = replace(others, own=self.pace(is_away=False))
        return crowd if self.is_patient else crowd.without_idlers()

    def note_told(self, told: Mapping[str, str], workers: Iterable[str]) -> None:
        """What the workers of the queue have told, and the names of all of them."""
        now = time.monotonic()
        self._beats.note(told, now)
        self._others = crowd_of(self._name, Pace(), told, workers, self._beats, now)
        self._noted_at = now
        self.meter.told_answer = self._others.answer
        self._num_told += 1
        self._in_flight.note_crowd(self.crowd(), self._others.num_workers)

    @property
    def num_left(self) -> int:
        """How many jobs this worker leaves to others that could begin them at once."""
        return self._left[0]

    def note_change(self) -> None:
        """This worker has taken jobs or given some back. It tells the others soon."""
        self._has_news = True

    def note_seconds_left(self, seconds: float) -> None:
        """So long all workers need for what is left. It is used when there are others."""
        is_new = self._in_flight.num_started > 0 and not self.meter.speed
        self._is_quick = is_new or 0 < seconds < END_SECONDS

    def poll_seconds(self) -> float:
        """When to look at the others again, at the latest; infinity if there is no hurry."""
        has_news, self._has_news = self._has_news, False
        if not (self._others.others or self._others.num_silent):
            return math.inf
        if has_news:
            return NEWS_SECONDS
        return QUICK_POLL_SECONDS if self._is_quick else math.inf

    def note_queued(self, num_queued: int, *, is_left: bool) -> None:
        """So many jobs wait. ``is_left``: this worker has free slots, and leaves them to others.

        When nobody has taken any for a while, it waits for nobody until the queue is empty.
        """
        now = time.monotonic()
        num_left = num_queued if is_left else 0
        if num_left != self._left[0]:
            self._left = (num_left, now)
        if not num_queued:
            self.is_patient = True
        elif num_left and now - self._left[1] >= PATIENCE_SECONDS:
            self.is_patient = False

    def forget(self) -> None:
        """The worker serves another queue: others work there."""
        self._others, self._beats = Crowd(), Beats()
        self.is_patient, self._left = True, (0, 0.0)

    def note_begun(self, works: Iterable[Work]) -> None:
        """These rows were handed to the engine."""
        for work in works:
            prompt = self._in_flight.prompt_work_of(work.job_id)
            self.meter.add_begun(prompt, work.request.params.max_tokens)
