"""How long MLX takes for something, on the device that serves."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from batchkv_worker.faults import is_device_fault

LEAST_TURNS = 3
MOST_SECONDS = 1.0  # of one comparison, once each had its turns

Way = Callable[[], Any]  # builds what is timed, anew each time


def least_times(runs: Sequence[Way], repeats: int = 7, times: int = 1) -> list[float | None]:
    """Least milliseconds that the arrays of each run take; None for what the backend refuses.

    ``times`` of one are started together: for what is shorter than a wait. Once before, unread:
    what is new is compiled then.

    The least, since what else the machine does can only add. In turns, since a machine may be
    slower for whole seconds: each is to have as many chances in a good one as the others. Of what
    takes long there are fewer turns: a start is not to wait for it.
    """
    spent: list[list[float] | None] = [[] for _ in runs]
    end = 0.0
    for turn in range(1 + repeats):
        if turn == 1:  # compiling counts neither as time nor against it
            end = time.perf_counter() + MOST_SECONDS
        if turn > LEAST_TURNS and time.perf_counter() > end:
            break
        for place, run in enumerate(runs):
            known = spent[place]
            if known is not None:
                found = _time(run, times)
                spent[place] = None if found is None else [*known, found]
    return [None if known is None else min(known[1:]) for known in spent]


def gain(plain: Way, other: Way, repeats: int = 15, times: int = 1) -> float:
    """How many times as long ``plain`` takes as ``other``; 0 if the backend refuses either."""
    before, after = least_times((plain, other), repeats, times)
    return 0.0 if before is None or after is None else before / after


def _time(run: Way, times: int) -> float | None:
    begin = time.perf_counter()
    try:
        mx.eval([run() for _ in range(times)])
    except (ValueError, RuntimeError) as fault:  # what MLX raises for a kernel that it lacks
        if is_device_fault(fault):
            raise
        return None
    return (time.perf_counter() - begin) * 1e3
