"""Surviving a short outage of Redis while following a batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from redis.exceptions import AuthenticationError, AuthorizationError, ConnectionError, TimeoutError

MAX_OUTAGE_SECONDS = 60.0
FIRST_PAUSE_SECONDS = 0.2
MAX_PAUSE_SECONDS = 2.0
LOOK_SECONDS = 0.1  # between two calls of who watches an outage

T = TypeVar("T")

_watcher: ContextVar[Callable[[], object]] = ContextVar("watcher", default=lambda: None)


@contextmanager
def outages_watched(watch: Callable[[], object]) -> Iterator[None]:
    """Inside, ``watch`` is called about ten times a second while ``patiently`` waits.

    What it raises ends the waiting.
    """
    token = _watcher.set(watch)
    try:
        yield
    finally:
        _watcher.reset(token)


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
        _pause(pause)
        pause = min(2 * pause, MAX_PAUSE_SECONDS)


def _pause(seconds: float) -> None:
    watch, end = _watcher.get(), time.monotonic() + seconds
    watch()
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, LOOK_SECONDS))
        watch()


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
