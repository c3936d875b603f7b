"""Times computations of MLX, on the device that serves."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from batchkv_worker.faults import is_device_fault

LEAST_TURNS = 3
MOST_SECONDS = 1.0  # of one comparison, once each had its turns

Way = Callable[[], Any]  # builds the arrays that are timed, new ones at each call


def least_times(
    runs: Sequence[Way], repeats: int = 7, times: int = 1, *, is_built: bool = False
) -> list[float | None]:
    """The least milliseconds that the arrays of each way take; None if the backend refuses it.

    ``times`` computations are started together, because one may be shorter than a wait. Each way
    runs once before that, without being timed, so that its kernels are compiled. ``is_built``: the
    arrays are built before the time begins, as the graph of a replayed step is.

    The least time counts, because other work of the machine can only add to it. The ways are timed
    in turns: a machine may be slower for whole seconds, and each way gets the same chances. Slow
    computations get fewer turns, so that a start does not wait for them.
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
                found = _time(run, times, is_built=is_built)
                spent[place] = None if found is None else [*known, found]
    return [None if known is None else min(known[1:]) for known in spent]


def gain(
    plain: Way, other: Way, repeats: int = 15, times: int = 1, *, is_built: bool = False
) -> float:
    """How many times as long ``plain`` takes as ``other``; 0 if the backend refuses either.

    See ``least_times``.
    """
    before, after = least_times((plain, other), repeats, times, is_built=is_built)
    return 0.0 if before is None or after is None else before / after


def _time(run: Way, times: int, *, is_built: bool) -> float | None:
    begin = time.perf_counter()
    try:
        found = [run() for _ in range(times)]
        if is_built:
            begin = time.perf_counter()
        mx.eval(found)
    except (ValueError, RuntimeError) as fault:  # MLX raises these for a kernel that it lacks
        if is_device_fault(fault):
            raise
        return None
    return (time.perf_counter() - begin) * 1e3
