"""Where a worker's time goes, by phase, in Chrome's trace format (``--trace FILE``).

Each thread has a track and is in one phase at a time, so that the phases of a track sum to the time
that its thread was there. The file is a JSON array whose end is written last: Perfetto and
chrome://tracing read it without, as a killed worker leaves it.

A stretch of one phase is an event, but short ones that take turns are put together: a second of
them is one event for each phase, in the order in which they came first, as long as all its
stretches together (``args.stretches`` of them have ended in it). With each ten thousand events
that second, and what is short, doubles, so that a file grows slower and slower. Off, a phase costs
a look whether anybody traces.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

log = logging.getLogger("batchkv.worker")

START, LOAD, MEASURE = "start", "load", "measure"
PREPARE, PREFILL, DECODE, IDLE, END = "prepare", "prefill", "decode", "idle", "end"
REDIS, STORE = "waiting for Redis", "waiting for the store"

WINDOW_SECONDS = 1.0  # of short stretches that are put together
OWN_SHARE = 0.05  # of that time, from which on a stretch is an event of its own
LONGEST_WINDOWS = 10  # that one phase may last before it is written all the same
EVENTS_PER_DOUBLING = 10_000


class Track:
    """The phases of one thread. ``enter`` is called on it, the rest by whoever traces."""

    def __init__(self, number: int, name: str) -> None:
        self.number, self.name = number, name
        self._trace: Trace | None = None
        self._phase: str | None = None
        self._since = self._window_since = 0.0
        self._sums: dict[str, tuple[float, int]] = {}  # seconds, stretches; in order of coming

    @property
    def is_traced(self) -> bool:
        """Whether anybody wants to know."""
        return self._trace is not None

    def attach(self, trace: Trace | None) -> None:
        """From now on phases go there, or nowhere."""
        self._trace, self._phase, self._sums = trace, None, {}

    def enter(self, phase: str | None) -> str | None:
        """The thread is in that phase from now on, or in none; returns the one before."""
        trace = self._trace
        if trace is None:
            return None
        with trace.lock:
            before = self._phase
            if phase != before:
                self._turn(trace, phase, trace.clock())
        trace.look()
        return before

    def look(self, trace: Trace, now: float, *, is_over: bool = False) -> None:
        """Write what is long enough; all there is when it ``is_over``. Under the trace's lock."""
        if self._phase is None:
            return
        self._add(now, 0)
        limit = trace.window_seconds * (1 if len(self._sums) > 1 else LONGEST_WINDOWS)
        if is_over or now - self._window_since >= limit:
            self._write(trace)
        if is_over:
            self._phase = None

    def _turn(self, trace: Trace, phase: str | None, now: float) -> None:
        """The stretch ends, and one of another phase begins."""
        if self._phase is None:
            self._window_since = self._since = now
        else:
            is_long = now - self._since >= trace.window_seconds * OWN_SHARE
            if is_long:
                self._write(trace)
            self._add(now, 1)
            if is_long or phase is None or now - self._window_since >= trace.window_seconds:
                self._write(trace)
        self._phase = phase

    def _add(self, now: float, num_ended: int) -> None:
        assert self._phase is not None
        seconds, count = self._sums.get(self._phase, (0.0, 0))
        self._sums[self._phase] = (seconds + now - self._since, count + num_ended)
        self._since = now

    def _write(self, trace: Trace) -> None:
        begin = self._window_since
        for phase, (seconds, count) in self._sums.items():
            trace.write("X", phase, self.number, begin, {"stretches": count}, seconds)
            begin += seconds
        self._window_since, self._sums = self._since, {}


class Trace:
    """The file. Its tracks are attached while it is open; one that cannot be written is left."""

    def __init__(
        self, file: IO[str], tracks: tuple[Track, ...], clock: Callable[[], float]
    ) -> None:
        self.lock = threading.RLock()
        self.clock = clock
        self.window_seconds = WINDOW_SECONDS
        self._file: IO[str] | None = file
        self._tracks = tracks
        self._origin = time.time() - clock()  # traces of several workers have one time
        self._num_events = 0
        self._look_at = clock() + WINDOW_SECONDS

    def begin(self, process: str) -> None:
        """Write the names of the process and its tracks, and trace them from now on."""
        with self.lock:
            now = self.clock()
            self.write("M", "process_name", 0, now, {"name": process})
            for track in self._tracks:
                self.write("M", "thread_name", track.number, now, {"name": track.name})
                track.attach(self)

    def look(self) -> None:
        """Have all tracks written, once in a while: a thread that waits cannot do it itself."""
        now = self.clock()
        if now < self._look_at:
            return
        with self.lock:
            self._look_at = now + WINDOW_SECONDS
            for track in self._tracks:
                track.look(self, self.clock())

    def close(self) -> None:
        """Write what is left, and the end of the array."""
        with self.lock:
            for track in self._tracks:
                track.look(self, self.clock(), is_over=True)
                track.attach(None)
            file, self._file = self._file, None
            if file is not None:
                try:
                    with file:
                        file.write("\n]\n")
                except OSError as fault:
                    self._tell(fault)

    def write(
        self,
        kind: str,
        name: str,
        track: int,
        at: float,
        told: dict[str, Any],
        seconds: float | None = None,
    ) -> None:
        """One event, in the file at once: a worker may be killed at any moment."""
        if self._file is None:
            return
        begin = round((self._origin + at) * 1e6, 1)
        event: dict[str, Any] = {"name": name, "ph": kind, "ts": begin}
        if seconds is not None:
            event["dur"] = round(seconds * 1e6, 1)
        event |= {"pid": os.getpid(), "tid": track, "args": told}
        try:
            self._file.write((",\n" if self._num_events else "[\n") + json.dumps(event))
            self._file.flush()
        except OSError as fault:
            file, self._file = self._file, None
            with suppress(OSError):  # it tries once more to write what it has
                file.close()
            self._tell(fault)
        self._num_events += 1
        if self._num_events % EVENTS_PER_DOUBLING == 0:
            self.window_seconds *= 2

    def _tell(self, fault: OSError) -> None:
        log.warning("the trace ends here: it cannot be written (%s)", fault.strerror or fault)


# Of this process: what its threads do is no matter of one part of it.
MAIN = Track(1, "main: Redis")
ENGINE = Track(2, "engine")
_open: Trace | None = None


def open_trace(path: str, process: str, clock: Callable[[], float] = time.perf_counter) -> None:
    """Trace this process into a new file; raises OSError when it cannot be written."""
    global _open
    close_trace()
    file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - it stays open until the end
    _open = Trace(file, (MAIN, ENGINE), clock)
    _open.begin(process)


def close_trace() -> None:
    """End the file, if one is open."""
    global _open
    trace, _open = _open, None
    if trace is not None:
        trace.close()


def note(name: str, **told: float) -> None:
    """Numbers of this moment, such as the most memory that was used."""
    trace = _open
    if trace is not None:
        with trace.lock:
            trace.write("C", name, ENGINE.number, trace.clock(), dict(told))
