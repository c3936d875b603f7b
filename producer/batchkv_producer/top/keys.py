"""Reads single keys from a terminal, without waiting for Enter."""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Key = Literal["quit", "up", "down", "drain", "resume"]

_KEYS: dict[bytes, Key] = {
    b"q": "quit",
    b"Q": "quit",
    b"\x03": "quit",
    b"\x1b[A": "up",
    b"\x1bOA": "up",
    b"k": "up",
    b"\x1b[B": "down",
    b"\x1bOB": "down",
    b"j": "down",
    b"d": "drain",
    b"u": "resume",
}
MAX_BYTES = 64


class Keys:
    """The keys of standard input. Without a terminal there are none."""

    def __init__(self) -> None:
        self._file = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._rest = b""

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Inside, keys are not shown, and come at once. Then the terminal is as it was."""
        if self._file is None:
            yield
            return
        before = termios.tcgetattr(self._file)
        try:
            tty.setcbreak(self._file)
            yield
        finally:
            termios.tcsetattr(self._file, termios.TCSADRAIN, before)

    def next(self, timeout_seconds: float) -> Key | None:
        """The next known key; None if none comes in time. A terminal that is gone ends it."""
        if not self._rest:
            watched = [] if self._file is None else [self._file]
            if not select.select(watched, [], [], max(0.0, timeout_seconds))[0]:
                return None
            assert self._file is not None
            self._rest = os.read(self._file, MAX_BYTES)
            if not self._rest:
                return "quit"
        return self._taken()

    def _taken(self) -> Key | None:
        """The first key of what was read; None if it is unknown."""
        for code, key in _KEYS.items():
            if self._rest.startswith(code):
                self._rest = self._rest[len(code) :]
                return key
        # An unknown escape sequence is left out as a whole.
        self._rest = b"" if self._rest.startswith(b"\x1b") else self._rest[1:]
        return None
