"""Why a worker takes no rows for now: a pause on battery (``--polite``), or it is drained.

The backlog goes back to the queue at once, and so do the rows that only wait in the engine. Rows
that have started have ``GRACE_SECONDS`` to end, then they go back too. No lease is held after that
until the machine runs on mains again. Meanwhile the machine may sleep.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from batchkv_producer.local.awake import Awake

log = logging.getLogger("batchkv.worker")


class PowerWatch:
    """Reads the power source every few seconds, on a thread of its own.

    ``is_on_battery`` is None until the first reading. An unknown source counts as mains. ``wake``
    is called on that thread when the source changes.
    """

    POLL_SECONDS = 5.0

    def __init__(self, ask: Callable[[], bool], wake: Callable[[], None]) -> None:
        self.is_on_battery: bool | None = None
        self._ask = ask
        self._wake = wake
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._main, name="batchkv-power", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, without waiting for a reading that has begun."""
        self._is_over.set()

    def _main(self) -> None:
        while not self._is_over.is_set():
            answer = self._answer()
            if answer is not self.is_on_battery:
                self.is_on_battery = answer
                self._wake()
            self._is_over.wait(self.POLL_SECONDS)

    def _answer(self) -> bool:
        try:
            return self._ask()
        except OSError as fault:
            if self.is_on_battery is not False:
                log.warning("the power source is unknown (%s): this worker does not pause", fault)
            return False


class Pause:
    """Whether the worker is paused. The main thread alone calls it. Times are monotonic seconds."""

    GRACE_SECONDS = 60.0

    def __init__(self, watch: PowerWatch | None = None, awake: Awake | None = None) -> None:
        self._watch = watch
        self._awake = awake
        self._since: float | None = None

    @property
    def may_work(self) -> bool:
        """Whether rows may be taken: not before the power source is known."""
        return self._watch is None or self._watch.is_on_battery is False

    @property
    def text(self) -> str:
        """The state for people; empty while there is no pause."""
        return "paused: on battery" if self._since is not None else ""

    @property
    def is_grace_over(self) -> bool:
        """Whether rows that have started must go back now."""
        return self._since is not None and time.monotonic() - self._since >= self.GRACE_SECONDS

    def look(self, num_started: int) -> bool:
        """Follow the power source; whether a pause has begun. ``num_started`` is for the log."""
        is_on = self._watch is not None and self._watch.is_on_battery is True
        if is_on == (self._since is not None):
            return False
        self._since = time.monotonic() if is_on else None
        if is_on:
            rows = f"{num_started:,} started rows" if num_started != 1 else "1 started row"
            log.info("%s: %s have %g s, the others go back", self.text, rows, self.GRACE_SECONDS)
        else:
            log.info("on mains again: this worker goes on")
        if self._awake is not None:
            (self._awake.release if is_on else self._awake.hold)()
        return is_on


class Drain:
    """Whether the worker is drained: it takes no rows until it is resumed, and stays alive.

    Somebody asks for that by a field of the worker's record in Redis (``manage.drain``), or by a
    file on its own machine (``presence.drain_file``). The main thread alone calls this.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._num_rows = 0

    @property
    def text(self) -> str:
        """The state for people; empty if rows may be taken."""
        return self._words() if self.is_on else ""

    def look(self, *, is_asked: bool, num_rows: int) -> bool:
        """Follow what was asked; whether draining has begun. ``num_rows`` have not ended."""
        self._num_rows = num_rows
        has_begun = is_asked and not self.is_on
        if has_begun:
            log.info("%s: no rows are taken until this worker is resumed", self._words())
        elif self.is_on and not is_asked:
            log.info("resumed: this worker takes rows again")
        self.is_on = is_asked
        return has_begun

    def _words(self) -> str:
        rows = "row" if self._num_rows == 1 else "rows"
        return f"draining {self._num_rows:,} {rows}" if self._num_rows else "drained"
