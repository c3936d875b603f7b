"""Write-behind: one thread that puts blocks into tiers while nobody waits.

What waits is bounded in bytes. A block that does not fit is dropped: losing a write costs a
recompute some day, waiting for a disk would cost decoding now.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

_log = logging.getLogger(__name__)


class Taken(Enum):
    """What became of a job that was handed in."""

    QUEUED = auto()
    KNOWN = auto()  # one of its name waits or runs already, and stands for it
    REFUSED = auto()  # no room, or closed


@dataclass(slots=True)
class _Job:
    num_bytes: int
    run: Callable[[], None]
    on_end: list[Callable[[], None]] = field(default_factory=list)


class WriteBehind:
    """A queue of at most ``max_bytes``, the job at work included; jobs run in order, one by one.

    A job is known by its name: while one waits or runs, another of its name is not taken.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._jobs: OrderedDict[str, _Job] = OrderedDict()  # the first is the one at work
        self._num_bytes = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="batchkv-cache-writer", daemon=True)
        self._thread.start()

    @property
    def num_bytes(self) -> int:
        """Bytes that wait or are being written."""
        return self._num_bytes

    def submit(
        self,
        name: str,
        num_bytes: int,
        run: Callable[[], None],
        on_end: Callable[[], None] | None = None,
    ) -> Taken:
        """Queue a job. ``on_end`` is called on the thread after it, however it ends.

        Of a job that is known, after the one that stands for it; of a refused one, never.
        """
        with self._changed:
            if self._is_closed:
                return Taken.REFUSED
            job = self._jobs.get(name)
            taken = Taken.QUEUED if job is None else Taken.KNOWN
            if job is None:
                if self._num_bytes + num_bytes > self._max_bytes:
                    return Taken.REFUSED
                job = self._jobs[name] = _Job(num_bytes, run)
                self._num_bytes += num_bytes
            if on_end is not None:
                job.on_end.append(on_end)
            self._changed.notify_all()
            return taken

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until nothing waits or runs; False when the time was up first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs, timeout_seconds)

    def close(self, timeout_seconds: float) -> int:
        """Take no more, write what waits for that long; returns how many jobs were given up."""
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._jobs, timeout_seconds)
            num_left = len(self._jobs)
            # The one at work cannot be called back; the others are not begun.
            for name in list(self._jobs)[1:]:
                self._num_bytes -= self._jobs.pop(name).num_bytes
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return num_left

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._is_closed)
                if not self._jobs:
                    return
                name, job = next(iter(self._jobs.items()))
            try:
                job.run()
            except Exception:  # noqa: BLE001 - the job loop; the trace is logged
                # A fault in one block's write is a bug, and no reason to write no other.
                _log.exception("writing %s failed", name)
            finally:
                self._end(name, job)

    def _end(self, name: str, job: _Job) -> None:
        """Tell those who wait for the job's end, also who came meanwhile; then it is gone."""
        while True:
            with self._changed:
                waiting, job.on_end = job.on_end, []
                if not waiting:
                    del self._jobs[name]
                    self._num_bytes -= job.num_bytes
                    self._changed.notify_all()
                    return
            for on_end in waiting:
                try:
                    on_end()
                except Exception:  # noqa: BLE001 - as above
                    _log.exception("what follows the write of %s failed", name)
