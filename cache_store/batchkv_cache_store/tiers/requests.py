"""Runs several requests to a server at once, each with a limit for its whole time.

A client's own timeouts count from packet to packet. A server that sends a byte now and then could
delay an answer without end. So requests run on threads of their own. After the limit, neither the
caller nor the end of the process waits for such a thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from batchkv_cache_store.errors import TierError

_T = TypeVar("_T")
_Item = TypeVar("_Item")
_Work = tuple["Future[Any]", Callable[[], Any]]


class Requests:
    """Runs at most ``max_threads`` requests at once. Threads may share it."""

    def __init__(self, max_threads: int, name: str) -> None:
        self._max_threads = max_threads
        self._name = name
        self._work: SimpleQueue[_Work | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._num_threads = 0
        self._num_busy = 0  # requests that wait or run

    def run(self, request: Callable[[], _T], limit_seconds: float) -> _T:
        """Return the request's result; TierError if it takes longer than the limit."""
        return self.map(lambda _: request(), [None], limit_seconds)[0]

    def map(
        self, request: Callable[[_Item], _T], items: Iterable[_Item], limit_seconds: float
    ) -> list[_T]:
        """Return the request's result for each item. The limit is for all of them together."""
        deadline = time.monotonic() + limit_seconds
        answers = [self._submit(partial(request, item)) for item in items]
        try:
            return [answer.result(max(0.0, deadline - time.monotonic())) for answer in answers]
        except TimeoutError as fault:
            raise TierError(f"no whole answer in {limit_seconds:g} s") from fault
        finally:
            for answer in answers:
                answer.cancel()  # has an effect if the request has not begun

    def close(self) -> None:
        """End the threads, each after its current request."""
        with self._lock:
            for _ in range(self._num_threads):
                self._work.put(None)

    def _submit(self, call: Callable[[], _T]) -> Future[_T]:
        answer: Future[_T] = Future()
        with self._lock:
            self._num_busy += 1
            if self._num_busy > self._num_threads < self._max_threads:
                self._num_threads += 1
                name = f"{self._name}-{self._num_threads}"
                threading.Thread(target=self._serve, name=name, daemon=True).start()
        self._work.put((answer, call))
        return answer

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            answer, call = work
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(call())
                except BaseException as fault:  # noqa: BLE001 - the caller gets it
                    answer.set_exception(fault)
            with self._lock:
                self._num_busy -= 1
