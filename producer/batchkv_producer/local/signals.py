"""Signals that end a command, which first has to stop its workers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from batchkv_producer.errors import BatchkvError

MAX_SIGNALS_NOTED = 2
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BatchkvError):
    """A signal ended the command. ``exit_code`` is 128 + its number, as in shells."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


@contextmanager
def noted_signals() -> Iterator[list[int]]:
    """Inside, signals that end a process are only appended to the list that this yields."""
    caught: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        caught.append(number)
        if len(caught) > MAX_SIGNALS_NOTED:  # the user no longer wants to wait for anything
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    # A signal that is ignored (nohup, a background job) stays ignored.
    handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in handled}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
