"""Requests to a server in flight at once, none of them waited for longer than its limit.

A client's own timeouts are between two packets: a server that sends a byte now and then is waited
for without end. So requests run on threads of their own, which may be left behind: neither who
asks nor the end of the process waits for them.
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
    """At most ``max_threads`` requests at once. Safe to share by threads."""

    def __init__(self, max_threads: int, name: str) -> None:
        self._max_threads = max_threads
        self._name = name
        self._work: SimpleQueue[_Work | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._num_threads = 0
        self._num_busy = 0  # requests that wait or run

    def run(self, request: Callable[[], _T], limit_seconds: float) -> _T:
        """What the request returns; TierError when that takes longer than the limit."""
        return self.map(lambda _: request(), [None], limit_seconds)[0]

    def map(
        self, request: Callable[[_Item], _T], items: Iterable[_Item], limit_seconds: float
    ) -> list[_T]:
        """What the request returns for each item; the limit is for all of them together."""
        deadline = time.monotonic() + limit_seconds
        answers = [self._submit(partial(request, item)) for item in items]
        try:
            return [answer.result(max(0.0, deadline - time.monotonic())) for answer in answers]
        except TimeoutError as fault:
            raise TierError(f"no whole answer in {limit_seconds:g} s") from fault
        finally:
            for answer in answers:
                answer.cancel()  # those that have not begun

    def close(self) -> None:
        """Let the threads end, each after the request that it is at."""
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
                except BaseException as fault:  # noqa: BLE001 - whoever asked gets it
                    answer.set_exception(fault)
            with self._lock:
                self._num_busy -= 1
