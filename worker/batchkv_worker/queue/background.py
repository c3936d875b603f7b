"""Asking Redis beside the engine: a server that does not answer keeps no row from starting."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Beside:
    """Makes one call at a time on a thread of its own; the caller looks after the engine meanwhile.

    ``meanwhile`` is called again and again until the answer is there, and waits in between;
    ``wake`` ends its wait and is called on the other thread.
    """

    def __init__(self, wake: Callable[[], None], meanwhile: Callable[[], None]) -> None:
        self._wake = wake
        self._meanwhile = meanwhile
        self._pool: ThreadPoolExecutor | None = ThreadPoolExecutor(1, "batchkv-redis")

    def __call__(self, call: Callable[[], T]) -> T:
        """What ``call`` returns, or raises."""
        if self._pool is None:
            return call()
        future = self._pool.submit(call)
        future.add_done_callback(lambda _: self._wake())
        while not future.done():
            self._meanwhile()
        return future.result()

    def close(self) -> None:
        """From now on calls are made here and now: there is no engine to look after any more."""
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None
