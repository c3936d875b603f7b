"""Retries reads while Redis is away, and spaces out polls, while a command follows a batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from redis.exceptions import AuthenticationError, AuthorizationError, ConnectionError, TimeoutError

from batchkv_producer.errors import AwayError

MAX_OUTAGE_SECONDS = 60.0
MAX_AWAY_SECONDS = 300.0  # of a gateway: a laptop may be out of its network for a while
FIRST_PAUSE_SECONDS = 0.2
MAX_PAUSE_SECONDS = 2.0
CALLBACK_SECONDS = 0.1  # between two calls of a callback during an outage

T = TypeVar("T")

Callback = Callable[[], object]


def _nothing() -> None:
    """What is called where nobody asked for a call."""


_callbacks: ContextVar[tuple[Callback, Callback]] = ContextVar(
    "callbacks", default=(_nothing, _nothing)
)


@contextmanager
def called_during_outages(callback: Callback, after: Callback = _nothing) -> Iterator[None]:
    """Inside, ``read_with_retry`` calls ``callback`` about ten times a second while it waits.

    When it has read after all, it calls ``after``. If ``callback`` raises, the wait ends with its
    exception.
    """
    token = _callbacks.set((callback, after))
    try:
        yield
    finally:
        _callbacks.reset(token)


def read_with_retry(read: Callable[[], T]) -> T:
    """The value that ``read`` returns. While the server is away, retries for up to a minute, and
    while a gateway is away for up to five.

    Only for reads, because a call may be repeated. A refused password is raised at once.
    """
    began = time.monotonic()
    pause = FIRST_PAUSE_SECONDS
    has_waited = False
    while True:
        try:
            found = read()
        except (AuthenticationError, AuthorizationError):
            raise
        except (ConnectionError, TimeoutError, AwayError) as fault:
            most = MAX_AWAY_SECONDS if isinstance(fault, AwayError) else MAX_OUTAGE_SECONDS
            if time.monotonic() + pause > began + most:
                raise
        else:
            if has_waited:
                _callbacks.get()[1]()
            return found
        _pause(pause)
        has_waited = True
        pause = min(2 * pause, MAX_PAUSE_SECONDS)


def _pause(seconds: float) -> None:
    (callback, _), end = _callbacks.get(), time.monotonic() + seconds
    callback()
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, CALLBACK_SECONDS))
        callback()


class Pace:
    """The pause between two polls: short after a change, up to a second without one."""

    def __init__(self, first_seconds: float = 0.2, longest_seconds: float = 1.0) -> None:
        self._first, self._longest = first_seconds, longest_seconds
        self._next = first_seconds

    def reset(self) -> None:
        """Make the next pause short again, because something has changed."""
        self._next = self._first

    def sleep(self, at_most_seconds: float = float("inf")) -> None:
        """Pause, and make the next pause longer."""
        time.sleep(max(0.0, min(self._next, at_most_seconds)))
        self._next = min(1.5 * self._next, self._longest)
