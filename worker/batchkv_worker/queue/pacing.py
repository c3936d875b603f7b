"""What a worker tells the others of its queue about its pace, and what it knows of theirs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from batchkv_producer.wire.transitions import Pulled
from batchkv_worker.engine.thread import EngineThread
from batchkv_worker.figures.engine import (
    COMPUTED_ANSWER,
    COMPUTED_PROMPT,
    IN_DECODE,
    IN_PREFILL,
    IN_WAITING,
)
from batchkv_worker.queue.in_flight import InFlight
from batchkv_worker.queue.runs.pace import Beats, Crowd, Meter, Pace, crowd_of, prompt_work

PATIENCE_SECONDS = 5.0  # how long a slow worker leaves rows to faster ones that take none


@dataclass(frozen=True, slots=True)
class _Progress:
    """Rows that the engine has, and the tokens of prompts and answers that it has computed."""

    num_waiting: int
    num_prefill: int = 0
    num_decode: int = 0
    num_prompt: int = 0
    num_generated: int = 0


class Pacing:
    """One worker's pace at its present queue. Times are monotonic seconds."""

    def __init__(self, name: str, engine: EngineThread, in_flight: InFlight) -> None:
        self._name = name
        self._engine = engine
        self._in_flight = in_flight
        self.meter = Meter()
        self.is_patient = True
        self._told: Mapping[str, str] = {}
        self._workers: list[str] = []
        self._beats = Beats()
        self._num_told = 0
        self._looked_at = time.monotonic()
        self._last = _Progress(0)
        self._left = (0, 0.0)  # how many jobs this worker leaves to others, and since when

    def _progress(self) -> _Progress:
        """The engine's progress; of one without figures, what can be known from outside."""
        figures, num_started = self._engine.figures(), self._in_flight.num_started
        if figures is None or IN_WAITING not in figures.levels:
            return _Progress(max(0, num_started - self._engine.num_slots))
        levels = (int(figures.levels[key]) for key in (IN_WAITING, IN_PREFILL, IN_DECODE))
        counts = (int(figures.counts[key]) for key in (COMPUTED_PROMPT, COMPUTED_ANSWER))
        return _Progress(*levels, *counts)

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

    def _is_full(self, progress: _Progress) -> bool:
        """Whether the engine had as many rows as it could compute."""
        return progress.num_waiting > 0 or progress.num_decode >= self._engine.num_slots > 0

    def pace(self, *, is_away: bool) -> Pace:
        """This worker's pace now."""
        progress, meter = self._progress(), self.meter
        held = self._in_flight.work_to_begin(progress.num_waiting, meter.answer_work)
        prompts = progress.num_prefill * (meter.job_work + meter.answer_work) / 2
        decode = progress.num_decode * meter.answer_work / 2
        num_free = max(0, self._engine.num_slots - self._in_flight.num_started)
        return Pace(meter.speed, held + prompts + decode, is_away, num_free, self._num_told)

    @property
    def num_waiting(self) -> int:
        """Rows that the engine has and has not begun."""
        return min(self._progress().num_waiting, self._in_flight.num_started)

    def crowd(self) -> Crowd:
        """All workers of the queue. What nobody has taken for a while is left to nobody."""
        mute = self._beats.mute(time.monotonic())
        own = self.pace(is_away=False)
        crowd = crowd_of(self._name, own, self._told, self._workers, mute)
        return crowd if self.is_patient else crowd.without_idlers()

    def note_told(self, told: Mapping[str, str], workers: Iterable[str]) -> None:
        """What the workers of the queue have told, and the names of all of them."""
        self._told, self._workers = told, list(workers)
        self._beats.note(told, time.monotonic())
        self._num_told += 1
        self._in_flight.note_crowd(self.crowd(), len(self._workers))

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
        self._told, self._workers, self._beats = {}, [], Beats()
        self.is_patient, self._left = True, (0, 0.0)

    def note_pulled(self, jobs: Iterable[Pulled]) -> None:
        """Jobs were pulled."""
        for job in jobs:
            self.meter.add_pulled(prompt_work(len(job.data), job.shared_bytes))
