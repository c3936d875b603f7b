"""What this machine does at most: how fast it reads memory, and how fast it multiplies."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from batchkv_worker.bench.bounds import Rates
from batchkv_worker.kv.backends import device

READ_SIDE = {True: 8192, False: 4096}  # of a float32 matrix, on a GPU and on a CPU: caches are less
SIDE = {True: 4096, False: 1024}  # of the square matrices that are multiplied
# How often in one evaluation. Starting one takes a fast GPU up to half the time of a reading.
READS, PRODUCTS = {True: 16, False: 1}, {True: 4, False: 1}
LEAST_RUNS, MOST_RUNS = 3, 50


def seconds_of(run: Callable[[], Any], limit_seconds: float = 2.0) -> float:
    """The median time of ``run``, of whose result the arrays are evaluated; at least three runs.

    Once before, unread: kernels are compiled then. More runs while they fit in the limit.
    """
    _time(run)
    spent: list[float] = []
    while len(spent) < LEAST_RUNS or (sum(spent) < limit_seconds and len(spent) < MOST_RUNS):
        spent.append(_time(run))
    return statistics.median(spent)


def measure_rates(dtype: mx.Dtype) -> Rates:
    """Of the device that MLX computes on by default, for products in ``dtype``.

    Memory is read by a product with one vector and by a copy; the faster of both counts. What an
    evaluation costs to start is a small part of each time.
    """
    is_gpu = device.kind() != "cpu"
    count, side, reads = READ_SIDE[is_gpu], SIDE[is_gpu], READS[is_gpu]
    matrix, vector = mx.random.normal((count, count)), mx.random.normal((count, 1))
    a, b = (mx.random.normal((side, side)).astype(dtype) for _ in range(2))
    mx.eval(matrix, vector, a, b)
    reading = seconds_of(lambda: [matrix @ vector for _ in range(reads)], 0.5) / reads
    copying = seconds_of(lambda: _copied(matrix, reads), 0.5) / reads
    read = max(matrix.nbytes / reading, 2 * matrix.nbytes / copying)
    times = PRODUCTS[is_gpu]
    multiplying = seconds_of(lambda: [a @ b for _ in range(times)], 1.0) / times
    mx.clear_cache()
    return Rates(read, 2 * side**3 / multiplying)


def _copied(matrix: mx.array, times: int) -> mx.array:
    """A copy of a copy of it, and so on: each is written over the one before."""
    for _ in range(times):
        matrix = matrix + 1
    return matrix


def _time(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    found = run()
    mx.eval([] if found is None else found)
    return max(time.perf_counter() - begin, 1e-9)
