"""Requests to stop: signals, RQ's shutdown command, the end of the parent.

Handlers only set flags and wake the main loop, which decides. The first signal is a warm stop: rows
that decode are finished, within the drain limit. The second is a cold stop: all jobs are given back
now. A signal within a second of the first is ignored, since a terminal and a parent both send one.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from batchkv_worker.errors import EXIT_ORPHANED

REPEATED_SIGNAL_SECONDS = 1.0
ORPHAN_GRACE_SECONDS = 10.0


class StopRequest:
    """The flags. ``wake`` must be safe to call in a signal handler."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self.warm_since: float | None = None  # monotonic seconds
        self.is_cold = False
        self.is_orphaned = False

    @property
    def is_asked(self) -> bool:
        """Whether nothing new may be taken."""
        return self.warm_since is not None

    def on_signal(self, *_: object) -> None:
        """A signal or RQ's shutdown command."""
        now = time.monotonic()
        if self.warm_since is None:
            self.warm_since = now
        elif now - self.warm_since >= REPEATED_SIGNAL_SECONDS:
            self.is_cold = True
        self._wake()

    def on_parent_gone(self) -> None:
        """The parent ended, so no process waits for the rows."""
        if self.warm_since is None:
            self.warm_since = time.monotonic()
        self.is_orphaned = True
        self._wake()

    def watch_parent(
        self,
        descriptor: int = 0,
        grace_seconds: float = ORPHAN_GRACE_SECONDS,
        hard_exit: Callable[[int], object] = os._exit,
    ) -> None:
        """Stop when ``descriptor``, the parent's end of a pipe, is at its end.

        Should the main thread be stuck, the process ends all the same after ``grace_seconds``.
        """

        def watch() -> None:
            try:
                while os.read(descriptor, 4096):
                    pass
            except OSError:
                pass  # closed: no process has the other end
            self.on_parent_gone()
            time.sleep(grace_seconds)
            hard_exit(EXIT_ORPHANED)

        threading.Thread(target=watch, name="batchkv-parent", daemon=True).start()
