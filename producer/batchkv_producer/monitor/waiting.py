"""Waits for a batch, or for the result of one job."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from batchkv_producer.monitor.status import BatchStatus
from batchkv_producer.retry import Pace, read_with_retry

Found = TypeVar("Found")


def wait_for_result(
    read: Callable[[], Found | None], check: Callable[[], object], wait_seconds: float
) -> Found | None:
    """Poll ``read`` until it has a result. None if there is none after ``wait_seconds``.

    ``check`` raises if there is no such job any more.
    """
    deadline = time.monotonic() + wait_seconds
    pace = Pace(first_seconds=0.05, longest_seconds=0.5)
    while (found := read()) is None:
        check()
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        pace.sleep(at_most_seconds=left)
    return found


def wait_until_done(
    look: Callable[[], BatchStatus],
    *,
    timeout_seconds: float | None = None,
    on_progress: Callable[[BatchStatus], None] | None = None,
) -> BatchStatus:
    """Poll ``look`` until the batch is done or the time is over. Returns the last status."""
    deadline = float("inf") if timeout_seconds is None else time.monotonic() + timeout_seconds
    pace, last_num_ended = Pace(), -1
    while True:
        now = read_with_retry(look)
        if on_progress is not None:
            on_progress(now)
        left = deadline - time.monotonic()
        if now.is_done or left <= 0:
            return now
        if now.num_ended != last_num_ended:
            pace.reset()
        last_num_ended = now.num_ended
        pace.sleep(at_most_seconds=left)
