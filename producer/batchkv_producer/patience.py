"""Surviving a short outage of Redis while following a batch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from redis.exceptions import AuthenticationError, AuthorizationError, ConnectionError, TimeoutError

MAX_OUTAGE_SECONDS = 60.0
FIRST_PAUSE_SECONDS = 0.2
MAX_PAUSE_SECONDS = 2.0

T = TypeVar("T")


def patiently(read: Callable[[], T]) -> T:
    """What ``read`` returns; while the server is away, try again for up to a minute.

    Only for reads: a call may be repeated. A refused password is no outage and raised at once.
    """
    deadline = time.monotonic() + MAX_OUTAGE_SECONDS
    pause = FIRST_PAUSE_SECONDS
    while True:
        try:
            return read()
        except (AuthenticationError, AuthorizationError):
            raise
        except (ConnectionError, TimeoutError):
            if time.monotonic() + pause > deadline:
                raise
        time.sleep(pause)
        pause = min(2 * pause, MAX_PAUSE_SECONDS)


class Pace:
    """The pause between two polls: short after news, up to a second when nothing happens."""

    def __init__(self, first_seconds: float = 0.2, longest_seconds: float = 1.0) -> None:
        self._first, self._longest = first_seconds, longest_seconds
        self._next = first_seconds

    def reset(self) -> None:
        """Something happened: poll quickly again."""
        self._next = self._first

    def sleep(self, at_most_seconds: float = float("inf")) -> None:
        """Pause, and make the next pause longer."""
        time.sleep(max(0.0, min(self._next, at_most_seconds)))
        self._next = min(1.5 * self._next, self._longest)
