"""How long MLX takes for something, on the device that serves."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx


def least_time(run: Callable[[], Any], repeats: int = 7, times: int = 1) -> float | None:
    """Least milliseconds that the arrays of ``run`` take; None for what the backend refuses.

    ``times`` of it are started together: for what is shorter than a wait.

    The least, since what else the machine does can only add, and does so by turns.
    """
    try:
        mx.eval([run() for _ in range(times)])
        spent: list[float] = []
        for _ in range(repeats):
            begin = time.perf_counter()
            mx.eval([run() for _ in range(times)])
            spent.append(time.perf_counter() - begin)
    except (ValueError, RuntimeError):  # what MLX raises for a kernel that a backend lacks
        return None
    return min(spent) * 1e3
