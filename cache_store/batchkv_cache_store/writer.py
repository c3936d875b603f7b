"""Write-behind: one thread writes blocks into tiers, so that no caller waits.

The queue is bounded in bytes. A block that does not fit is dropped. A lost write may cost a
recompute later, but a wait for a disk would stop decoding now. The bytes a second are bounded, too,
so that writes leave the network and the memory to others.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

_log = logging.getLogger(__name__)


class SubmitResult(Enum):
    """The result of ``WriteBehind.submit``."""

    QUEUED = auto()
    KNOWN = auto()  # a job of the same name already waits or runs, and serves for both
    REFUSED = auto()  # the queue is full or closed


@dataclass(slots=True)
class _Job:
    num_bytes: int
    run: Callable[[], None]
    on_end: list[Callable[[], None]] = field(default_factory=list)


class WriteBehind:
    """A queue of at most ``max_bytes``, with the running job. Jobs run in order, one by one.

    Jobs have names. While a job waits or runs, another job of its name is not queued. After a job
    the thread rests, so that it writes no more than ``bytes_per_second``, until it is closed.
    """

    def __init__(self, max_bytes: int, bytes_per_second: float = math.inf) -> None:
        self._max_bytes = max_bytes
        self._bytes_per_second = bytes_per_second
        self._changed = threading.Condition()
        self._jobs: OrderedDict[str, _Job] = OrderedDict()  # the first one runs
        self._num_bytes = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="batchkv-cache-writer", daemon=True)
        self._thread.start()

    @property
    def num_bytes(self) -> int:
        """Bytes of all jobs that wait or run."""
        return self._num_bytes

    def submit(
        self,
        name: str,
        num_bytes: int,
        run: Callable[[], None],
        on_end: Callable[[], None] | None = None,
    ) -> SubmitResult:
        """Queue a job. The writer's thread calls ``on_end`` after it, however it ends.

        If a job of that name is queued already, ``on_end`` is called after that one. It is never
        called for a refused job.
        """
        with self._changed:
            if self._is_closed:
                return SubmitResult.REFUSED
            job = self._jobs.get(name)
            result = SubmitResult.QUEUED if job is None else SubmitResult.KNOWN
            if job is None:
                if self._num_bytes + num_bytes > self._max_bytes:
                    return SubmitResult.REFUSED
                job = self._jobs[name] = _Job(num_bytes, run)
                self._num_bytes += num_bytes
            if on_end is not None:
                job.on_end.append(on_end)
            self._changed.notify_all()
            return result

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until no job waits or runs. Returns False if the time was over first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs, timeout_seconds)

    def close(self, timeout_seconds: float) -> int:
        """Refuse new jobs, and wait at most so long for the queued ones. Returns how many are left.

        Jobs that have not begun by then are dropped.
        """
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._jobs, timeout_seconds)
            num_left = len(self._jobs)
            # The running job cannot be stopped; the others have not begun.
            for name in list(self._jobs)[1:]:
                self._num_bytes -= self._jobs.pop(name).num_bytes
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return num_left

    def _work(self) -> None:
        rest_seconds = 0.0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, rest_seconds)
                self._changed.wait_for(lambda: self._jobs or self._is_closed)
                if not self._jobs:
                    return
                name, job = next(iter(self._jobs.items()))
            start = time.monotonic()
            try:
                job.run()
            except Exception:  # noqa: BLE001 - the job loop; the trace is logged
                # A failed write is a bug, but the other blocks must still be written.
                _log.exception("writing %s failed", name)
            finally:
                self._end(name, job)
            took = time.monotonic() - start
            rest_seconds = max(0.0, job.num_bytes / self._bytes_per_second - took)

    def _end(self, name: str, job: _Job) -> None:
        """Call all ``on_end`` of a job, also those that were added meanwhile, then remove it."""
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
                    _log.exception("on_end after the write of %s failed", name)
