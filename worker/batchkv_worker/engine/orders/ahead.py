"""The thread that prepares rows, so that the device computes meanwhile.

Tokenizers of native code let other threads run while they work. If this thread ends by itself, the
engine ends, too: its rows would wait for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from batchkv_worker.engine.orders.inbox import Add, Inbox
from batchkv_worker.events import Work
from batchkv_worker.trace import AHEAD, IDLE, PREPARE


class Ahead:
    """Prepares the rows of an inbox in their order, one at a time, until the inbox is stopped."""

    def __init__(self, inbox: Inbox, prepare: Callable[[Work], Add]) -> None:
        self._inbox = inbox
        self._prepare = prepare
        self._thread = threading.Thread(target=self._main, name="batchkv-ahead", daemon=True)

    def start(self) -> None:
        """Start the thread. From now on, all rows go through it."""
        self._inbox.begin_ahead()
        self._thread.start()

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the thread's end. Returns whether it has ended."""
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _main(self) -> None:
        fault: BaseException | None = None
        try:
            AHEAD.enter(IDLE)
            while (work := self._inbox.next_raw()) is not None:
                AHEAD.enter(PREPARE)
                add = self._prepare(work)
                AHEAD.enter(IDLE)
                self._inbox.put(add)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the rows must go back
            fault = error
        finally:
            AHEAD.enter(None)
            if fault is not None:
                self._inbox.fail(fault)
