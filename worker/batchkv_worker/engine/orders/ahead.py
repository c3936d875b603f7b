"""The threads that prepare rows, so that the device computes meanwhile.

Tokenizers of native code let other threads run while they work. A row of 600 tokens takes two to
four milliseconds, and a GPU computes short answers sooner than one thread prepares their prompts.
If one of these threads ends by itself, the engine ends, too: rows would wait for ever.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from batchkv_worker.engine.orders.inbox import Add, Inbox
from batchkv_worker.events import Work
from batchkv_worker.trace import AHEAD, IDLE, PREPARE

MOST_THREADS = 4
CPUS_PER_THREAD = 4  # the engine, what launches its steps, and BLAS need processors, too


def num_threads() -> int:
    """How many threads prepare rows, by the processors that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    num_cpus = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min(MOST_THREADS, num_cpus // CPUS_PER_THREAD))


class Ahead:
    """Prepares the rows of an inbox until the inbox is stopped, each thread one at a time."""

    def __init__(self, inbox: Inbox, prepare: Callable[[Work], Add], count: int) -> None:
        self._inbox = inbox
        self._prepare = prepare
        self._lock = threading.Lock()  # of what follows, and of the trace's phase
        self._num_busy, self._num_left = 0, count
        self._threads = [
            threading.Thread(target=self._main, name=f"batchkv-ahead-{number}", daemon=True)
            for number in range(count)
        ]

    def start(self) -> None:
        """Start the threads. From now on, all rows go through them."""
        self._inbox.begin_ahead()
        AHEAD.enter(IDLE)
        for thread in self._threads:
            thread.start()

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the end of all threads. Returns whether they have ended."""
        until = time.monotonic() + timeout_seconds
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _main(self) -> None:
        fault: BaseException | None = None
        try:
            while (taken := self._inbox.next_raw()) is not None:
                self._note_busy(1)
                try:
                    add = self._prepare(taken.work)
                finally:
                    self._note_busy(-1)
                self._inbox.put(taken, add)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the rows must go back
            fault = error
        finally:
            self._note_end()
            if fault is not None:
                self._inbox.fail(fault)

    def _note_busy(self, change: int) -> None:
        """The trace has one track for all threads: any of them prepares a row, or none does."""
        with self._lock:
            self._num_busy += change
            AHEAD.enter(PREPARE if self._num_busy else IDLE)

    def _note_end(self) -> None:
        with self._lock:
            self._num_left -= 1
            if not self._num_left:
                AHEAD.enter(None)
