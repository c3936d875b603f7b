"""Records a worker's time by phase, in Chrome's trace format (``--trace FILE``).

Each thread has a track and is in one phase at a time. So the phases of a track sum to the life of
its thread. The threads that prepare rows share a track, which is in their phase while any of them
is. The file is a JSON array whose end is written last. Perfetto and chrome://tracing also read a
file without its end, as a killed worker leaves it.

A long stretch of one phase is an event. Short stretches that alternate are merged: a second of them
becomes one event for each phase, in the order of their first stretches. An event is as long as all
its stretches together, and ``args.stretches`` counts those that ended in it. After each ten
thousand events that second doubles, and the limit of a short stretch with it. So a file grows ever
more slowly. Without a trace, a phase costs one comparison.
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
MASKS = "masks"
REDIS, STORE = "waiting for Redis", "waiting for the store"

WINDOW_SECONDS = 1.0  # of short stretches that are merged
OWN_SHARE = 0.05  # of that time; a longer stretch is an event of its own
LONGEST_WINDOWS = 10  # after so many, an unfinished phase is written
EVENTS_PER_DOUBLING = 10_000


class Track:
    """The phases of one thread. The thread calls ``enter``; ``Trace`` calls the other methods."""

    def __init__(self, number: int, name: str) -> None:
        self.number, self.name = number, name
        self._trace: Trace | None = None
        self._phase: str | None = None
        self._since = self._window_since = 0.0
        self._sums: dict[str, tuple[float, int]] = {}  # seconds, stretches; by first stretch

    @property
    def is_traced(self) -> bool:
        """Whether a trace is open."""
        return self._trace is not None

    def attach(self, trace: Trace | None) -> None:
        """Send the phases to this trace from now on; None: to none."""
        self._trace, self._phase, self._sums = trace, None, {}

    def enter(self, phase: str | None) -> str | None:
        """Begin a phase, or none. Returns the phase before."""
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
        """Write the sums if their time is over, or if it ``is_over``. Needs the trace's lock."""
        if self._phase is None:
            return
        self._add(now, 0)
        limit = trace.window_seconds * (1 if len(self._sums) > 1 else LONGEST_WINDOWS)
        if is_over or now - self._window_since >= limit:
            self._write(trace)
        if is_over:
            self._phase = None

    def _turn(self, trace: Trace, phase: str | None, now: float) -> None:
        """End the stretch, and begin one of another phase."""
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
    """The file. Tracks are attached while it is open. After a failed write it is closed."""

    def __init__(
        self, file: IO[str], tracks: tuple[Track, ...], clock: Callable[[], float]
    ) -> None:
        self.lock = threading.RLock()
        self.clock = clock
        self.window_seconds = WINDOW_SECONDS
        self._file: IO[str] | None = file
        self._tracks = tracks
        self._origin = time.time() - clock()  # so that traces of several workers have one time
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
        """Write all tracks now and then, because a waiting thread cannot write its own."""
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
                    self._warn(fault)

    def write(
        self,
        kind: str,
        name: str,
        track: int,
        at: float,
        values: dict[str, Any],
        seconds: float | None = None,
    ) -> None:
        """Write one event, and flush it, because a worker may be killed at any moment."""
        if self._file is None:
            return
        begin = round((self._origin + at) * 1e6, 1)
        event: dict[str, Any] = {"name": name, "ph": kind, "ts": begin}
        if seconds is not None:
            event["dur"] = round(seconds * 1e6, 1)
        event |= {"pid": os.getpid(), "tid": track, "args": values}
        try:
            self._file.write((",\n" if self._num_events else "[\n") + json.dumps(event))
            self._file.flush()
        except OSError as fault:
            file, self._file = self._file, None
            with suppress(OSError):  # it tries to write its buffer again
                file.close()
            self._warn(fault)
        self._num_events += 1
        if self._num_events % EVENTS_PER_DOUBLING == 0:
            self.window_seconds *= 2

    def _warn(self, fault: OSError) -> None:
        log.warning("the trace ends here: it cannot be written (%s)", fault.strerror or fault)


# Of this process, because the phases of its threads belong to all of its parts.
MAIN = Track(1, "main: Redis")
ENGINE = Track(2, "engine")
AHEAD = Track(3, "rows prepared ahead")
_open: Trace | None = None


def open_trace(path: str, process: str, clock: Callable[[], float] = time.perf_counter) -> None:
    """Trace this process into a new file; raises OSError if it cannot be written."""
    global _open
    close_trace()
    file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - it stays open until the end
    _open = Trace(file, (MAIN, ENGINE, AHEAD), clock)
    _open.begin(process)


def close_trace() -> None:
    """End the file, if one is open."""
    global _open
    trace, _open = _open, None
    if trace is not None:
        trace.close()


def note(name: str, **values: float) -> None:
    """Write numbers of this moment, such as the peak memory, if there is a trace."""
    trace = _open
    if trace is not None:
        with trace.lock:
            trace.write("C", name, ENGINE.number, trace.clock(), dict(values))
