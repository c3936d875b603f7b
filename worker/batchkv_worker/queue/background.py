"""Calls of Redis on a background thread: a server that does not answer keeps no row from starting.

The main thread serves the engine meanwhile. That is re-entrant: rows may end, start or be canceled
while a method waits for its answer. Each caller therefore passes ``meanwhile``, the loop that runs
until the answer comes.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

T = TypeVar("T")


class ServeEngineUntil(Protocol):
    """Run a call in the background, and serve the engine until it has answered."""

    def __call__(self, call: Callable[[], T], /) -> T:
        """Return the result of ``call``, or raise its error."""


class Background:
    """Runs one call at a time on its thread. ``wake`` ends a wait of ``meanwhile``; it is called on
    that thread."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._pool: ThreadPoolExecutor | None = ThreadPoolExecutor(1, "batchkv-redis")

    def run(self, call: Callable[[], T], meanwhile: Callable[[], None]) -> T:
        """The result of ``call``, or its error. Until then ``meanwhile`` is called; it waits."""
        if self._pool is None:
            return call()
        answer = self._pool.submit(call)
        answer.add_done_callback(lambda _: self._wake())
        while not answer.done():
            meanwhile()
        return answer.result()

    def close(self) -> None:
        """End the thread. From now on ``run`` makes each call itself."""
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None
