"""Sums over many rows in bounded memory: a distribution of whole numbers, and work over time."""

from __future__ import annotations

from batchkv_producer.report.facts import Bar, Bin, Distribution, Throughput

EXACT = 1000  # below, each value is kept; above, its first three digits
MAX_BARS = 16
LONG_TAIL = 8  # with a largest value of so many medians, bars become wider to the right
WIDTHS = (1, 5, 15, 60, 300, 900, 3600, 10_800, 43_200, 86_400, 604_800)  # each divides the next
OUTCOMES = ("ok", "failed", "canceled")
MIN_SECONDS = 0.001  # so that rates are finite
NUM_COUNTS = len(OUTCOMES) + 3


class Histogram:
    """Counts whole numbers of 0 or more."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._sum = self._num = 0
        self._smallest, self._largest = 0, 0

    def add(self, value: int) -> None:
        """Count one value."""
        self._smallest = min(value, self._smallest) if self._num else value
        self._largest = max(value, self._largest)
        self._num += 1
        self._sum += value
        key = value
        if value >= EXACT:
            scale = 10 ** (len(str(value)) - 3)
            key = value // scale * scale
        self._counts[key] = self._counts.get(key, 0) + 1

    @property
    def largest(self) -> int:
        """The largest value, 0 if there is none."""
        return self._largest

    @property
    def median(self) -> int:
        """The median, 0 if there is no value."""
        return self._rank(50) if self._num else 0

    def distribution(self) -> Distribution | None:
        """What was counted; None if there is no value."""
        if not self._num:
            return None
        return Distribution(
            count=self._num,
            mean=self._sum / self._num,
            smallest=self._smallest,
            p50=self._rank(50),
            p90=self._rank(90),
            p99=self._rank(99),
            largest=self._largest,
            bars=self._bars(),
        )

    def _rank(self, percent: int) -> int:
        wanted, seen = -(-self._num * percent // 100), 0
        for value in sorted(self._counts):
            seen += self._counts[value]
            if seen >= wanted:
                return max(value, self._smallest)
        return self._largest

    def _bars(self) -> tuple[Bar, ...]:
        edges = self._edges()
        counts = [0] * (len(edges) - 1)
        place = 0
        for value in sorted(self._counts):
            while value >= edges[place + 1]:
                place += 1
            counts[place] += self._counts[value]
        return tuple(map(Bar, edges, edges[1:], counts))

    def _edges(self) -> list[int]:
        """Round numbers from the smallest value to above the largest."""
        low = min(self._counts)
        if self._largest > LONG_TAIL * max(1, self._rank(50)):
            ladder = [0] + [step * 10**power for power in range(19) for step in (1, 2, 5)]
            first = max(index for index, edge in enumerate(ladder) if edge <= low)
            last = next(index for index, edge in enumerate(ladder) if edge > self._largest)
            return ladder[first : last + 1]
        step = _round_step(self._largest - low + 1)
        first_edge = low // step * step
        return list(range(first_edge, self._largest + step + 1, step))


def _round_step(span: int) -> int:
    """1, 2 or 5 times a power of ten, so that at most ``MAX_BARS`` steps cover a span."""
    power = 1
    while True:
        for factor in (1, 2, 5):
            if span <= factor * power * (MAX_BARS - 1):
                return factor * power
        power *= 10


class Timeline:
    """Rows and tokens over time, in bins that become wider as the time grows."""

    def __init__(self, max_bins: int) -> None:
        self._max_bins = max_bins
        self._level = 0
        self._bins: dict[int, list[float]] = {}
        self.first = self.last = 0.0  # when the first row began and the last one ended

    @property
    def width_seconds(self) -> int:
        """The width of all bins."""
        return WIDTHS[self._level]

    def add(self, start: float, end: float, outcome: str, tokens: tuple[int, int, int]) -> None:
        """Count a row: when it began and ended, how, and its prompt, cached and new tokens."""
        start = min(start, end)
        first = min(start, self.first) if self._bins else start
        last = max(end, self.last) if self._bins else end
        if last - first >= (self._max_bins - 1) * WIDTHS[-1]:
            return  # many years: a wrong clock
        self.first, self.last = float(first), float(last)
        while last // self.width_seconds - first // self.width_seconds >= self._max_bins:
            self._widen()
        self._bin(end)[OUTCOMES.index(outcome)] += 1
        if not any(tokens):
            return
        width, at = self.width_seconds, start
        while True:
            until = min(end, (at // width + 1) * width)
            share = (until - at) / (end - start) if end > start else 1.0
            counts = self._bin(at)
            for place, count in enumerate(tokens, len(OUTCOMES)):
                counts[place] += count * share
            if until >= end:
                return
            at = until

    def throughput(self) -> Throughput:
        """All bins from the first to the last, empty ones among them."""
        if not self._bins:
            return Throughput(self.width_seconds, ())
        numbers = range(min(self._bins), max(self._bins) + 1)
        return Throughput(self.width_seconds, tuple(map(self._as_bin, numbers)))

    @property
    def active_seconds(self) -> float:
        """The time from the first row to the last, less that of empty bins."""
        if not self._bins:
            return 0.0
        num_empty = max(self._bins) - min(self._bins) + 1 - len(self._bins)
        return max(0.0, self.last - self.first - num_empty * self.width_seconds)

    def _as_bin(self, number: int) -> Bin:
        counts = self._bins.get(number, [0.0] * NUM_COUNTS)
        width = self.width_seconds
        begin, end = max(number * width, self.first), min((number + 1) * width, self.last)
        # A row's end is stored in whole seconds, so the last bin has a part of one at least.
        seconds = max(1.0 if end == self.last else MIN_SECONDS, end - begin)
        ok, failed, canceled = map(int, counts[: len(OUTCOMES)])
        return Bin(float(number * width), seconds, ok, failed, canceled, *counts[len(OUTCOMES) :])

    def _bin(self, at: float) -> list[float]:
        return self._bins.setdefault(int(at // self.width_seconds), [0.0] * NUM_COUNTS)

    def _widen(self) -> None:
        """Join bins to the next width."""
        ratio = WIDTHS[self._level + 1] // self.width_seconds
        self._level += 1
        before, self._bins = self._bins, {}
        for number, counts in before.items():
            joined = self._bins.setdefault(number // ratio, [0.0] * NUM_COUNTS)
            for place, count in enumerate(counts):
                joined[place] += count
