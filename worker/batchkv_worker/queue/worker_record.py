"""A worker's record on the server, which ``batchkv workers`` shows, and lines for its log.

The fields are written with the heartbeat, so that no job costs one more command. Only ``bkv_state``
is written when it changes: how far loading is, or that the worker stops.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from batchkv_producer.wire.figures.worker import BUSY_SECONDS
from batchkv_worker.engine.thread import EngineThread
from batchkv_worker.events import Completed
from batchkv_worker.figures.report import Figures
from batchkv_worker.queue.abilities import own_abilities
from batchkv_worker.queue.state import WorkerState
from batchkv_worker.queue.timers import Timer
from batchkv_worker.settings import WorkerSettings

log = logging.getLogger("batchkv.worker")

MINUTE_SECONDS = 60.0
SAMPLE_SECONDS = 1.0
LOADING_LOG_SECONDS = 10.0  # between two lines about loading

Counts = tuple[int, int, int, int]  # rows, generated, prompt and cached tokens


@cache
def own_version() -> str:
    """The version of batchkv that is installed; empty if it is unknown."""
    try:
        return version("batchkv")
    except PackageNotFoundError:
        return ""


def constant_fields() -> dict[str, str]:
    """Fields of the record that never change. Older versions have none of them."""
    return {"bkv_version": own_version(), "bkv_abilities": " ".join(own_abilities())}


class LastMinute:
    """Sums over the rows that ended well in the last minute. Times are monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sums: Counts = (0, 0, 0, 0)
        self._busy_seconds = 0.0
        self._samples = deque([(clock(), self._busy_seconds, self._sums)])

    def add(self, event: Completed) -> None:
        """A row has ended well."""
        usage = event.usage
        new = (1, usage.completion, usage.prompt, usage.cached)
        rows, generated, prompt, cached = (a + b for a, b in zip(self._sums, new, strict=True))
        self._sums = (rows, generated, prompt, cached)

    def sample(self, *, is_busy: bool) -> None:
        """To be called about once a second; ``is_busy``: there are rows now."""
        now = self._clock()
        if is_busy or self._sums != self._samples[-1][2]:  # or some came and ended meanwhile
            self._busy_seconds += now - self._samples[-1][0]
        self._samples.append((now, self._busy_seconds, self._sums))
        while len(self._samples) > 2 and now - self._samples[1][0] >= MINUTE_SECONDS:
            self._samples.popleft()

    @property
    def counts(self) -> Counts:
        """Rows, generated, prompt and cached tokens."""
        before = self._samples[0][2]
        rows, generated, prompt, cached = (a - b for a, b in zip(self._sums, before, strict=True))
        return rows, generated, prompt, cached

    @property
    def busy_seconds(self) -> float:
        """The time in which there were rows."""
        return self._busy_seconds - self._samples[0][1]

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens a second, of that time."""
        return self.counts[1] / max(self.busy_seconds, SAMPLE_SECONDS)


class WorkerRecord:
    """The record of one session. ``publish`` writes its fields."""

    def __init__(
        self,
        settings: WorkerSettings,
        engine: EngineThread,
        state: WorkerState,
        publish: Callable[[dict[str, str]], None],
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._in_flight = state.in_flight
        self._state = state
        self.figures = Figures(engine, self._levels, state.in_flight.counts, state.live_counts)
        self._publish = publish
        self._minute = LastMinute(time.monotonic)
        self._stopping = ""
        self.draining = ""  # as ``Drain.text`` says it
        self.paused = ""  # why, as ``Pause.text`` says it
        self._published = ""  # the state in the record
        self._rate = 0  # tokens a second, in the record
        self._logged = ""
        self._sample_timer = Timer(SAMPLE_SECONDS)
        self._minute_timer = Timer(MINUTE_SECONDS)
        self._minute_timer.restart(time.monotonic())
        self._loading_timer = Timer(LOADING_LOG_SECONDS)

    @property
    def state(self) -> str:
        """More than RQ's state: stopping, loading, drained, short of memory. Mostly empty."""
        held_up = self._stopping or self._engine.loading or self.draining or self.paused
        return held_up or self._engine.trouble

    def count(self, event: Completed) -> None:
        """A row has ended well."""
        self._minute.add(event)

    def fields(self) -> dict[str, str]:
        """All fields of the record; see ``redis_keys``."""
        self._published, self._rate = self.state, round(self._minute.tokens_per_second)
        makers = self._engine.makers
        return {
            **constant_fields(),
            "bkv_model": self._settings.model,
            "bkv_fingerprint": makers.get("", self._engine.maker).fingerprint,
            "bkv_scheme": self._settings.kv_scheme,
            "bkv_dtype": self._engine.maker.dtype,
            **self._adapters(),
            "bkv_state": self._published,
            "bkv_tokens_per_second": str(self._rate),
            "bkv_memory": str(self._engine.memory_bytes),
            "bkv_slots": str(self._engine.num_slots),
            "bkv_beat_ms": f"{1000 * self._settings.heartbeat_seconds:.0f}",
            **self.figures.fields(),
        }

    def _levels(self) -> dict[str, float]:
        """What the worker holds now, for its figures."""
        return {
            "rows.held": len(self._in_flight),
            "rows.live": self._state.live.num_rows,
            "rows.results": len(self._state.results),
            "slots": self._engine.num_slots,
            BUSY_SECONDS: round(self._minute.busy_seconds, 3),
        }

    def _adapters(self) -> dict[str, str]:
        """The field of the adapters, if there are any."""
        makers, adapters = self._engine.makers, self._settings.adapters
        fingerprints = (makers[one.name].fingerprint if makers else "" for one in adapters)
        pairs = zip(adapters, fingerprints, strict=True)
        text = " ".join(f"{one.name}:{fingerprint}" for one, fingerprint in pairs)
        return {"bkv_adapters": text} if adapters else {}

    def log_loading(self) -> None:
        """Log how far loading is, every few seconds."""
        now, text = time.monotonic(), self._engine.loading
        if text and text != self._logged and self._loading_timer.is_due(now):
            self._loading_timer.restart(now)
            self._logged = text
            log.info("model %s: %s", self._settings.model, text)

    def update(self) -> None:
        """Once a turn: publish a state that has changed, and log each minute's work.

        The first speed does not wait for a heartbeat either: a busy worker with 0 tokens a second
        looks like one that hangs.
        """
        now = time.monotonic()
        if not self._sample_timer.is_due(now):
            return
        self._sample_timer.restart(now)
        self._minute.sample(is_busy=self._in_flight.num_started > 0)
        if self._minute_timer.is_due(now):
            self._minute_timer.restart(now)
            self._log_minute()
        is_first = not self._rate and round(self._minute.tokens_per_second) > 0
        if self.state != self._published or is_first:  # all fields: the record may have none yet
            self._publish(self.fields())

    def stop(self) -> None:
        """The worker is stopping: log once what happens to the rows."""
        if self._stopping:
            return
        num_rows, seconds = len(self._in_flight.started), self._settings.drain_seconds
        rows = f"{num_rows:,} row" if num_rows == 1 else f"{num_rows:,} rows"
        self._stopping = f"finishing {rows}" if num_rows and seconds else "stopping"
        if num_rows and seconds:
            limit = f"up to {seconds:g} s; a second signal gives them back now"
            log.info("%s, %s", self._stopping, limit)
        else:
            log.info("stopping: %s", f"giving {rows} back" if num_rows else "nothing to finish")

    def _log_minute(self) -> None:
        rows, _, prompt, cached = self._minute.counts
        if not (rows or self._in_flight.num_started):
            return
        slots = self._engine.num_slots
        log.info(
            "last minute: %s rows, %s tok/s, %d of %d slots, cache %.0f %%",
            *(f"{rows:,}", f"{self._minute.tokens_per_second:,.0f}"),
            *(min(self._in_flight.num_started, slots), slots, 100 * cached / max(prompt, 1)),
        )
