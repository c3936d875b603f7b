"""Durations, counted by their length."""

from __future__ import annotations

from bisect import bisect_left

from batchkv_producer.wire.figures.worker import Times

STEP_BOUNDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)  # seconds
FIRST_TOKEN_BOUNDS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
ROW_BOUNDS = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


class Histogram:
    """Written by one thread. Any thread may read it: sum and counts may differ by one event."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total_seconds = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._total_seconds += seconds

    @property
    def times(self) -> Times:
        """What was counted so far."""
        return Times(self._bounds, tuple(self._counts), self._total_seconds)


def joined(one: Times, other: Times) -> Times:
    """The sum of two histograms with the same bounds."""
    assert one.bounds == other.bounds
    counts = tuple(a + b for a, b in zip(one.counts, other.counts, strict=True))
    return Times(one.bounds, counts, one.total_seconds + other.total_seconds)
