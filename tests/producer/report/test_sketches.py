"""Distributions and work over time in bounded memory."""

from __future__ import annotations

import random

from batchkv_producer.report.sketches import Histogram, Timeline


def histogram(*values: int) -> Histogram:
    found = Histogram()
    for value in values:
        found.add(value)
    return found


def test_percentiles_are_exact_below_a_thousand() -> None:
    """The nearest rank: of 1 to 100, the 90th percentile is 90."""
    found = histogram(*range(1, 101)).distribution()
    assert found is not None
    assert (found.smallest, found.p50, found.p90, found.p99, found.largest) == (1, 50, 90, 99, 100)
    assert found.mean == 50.5


def test_large_values_keep_three_digits() -> None:
    """A million different values take little memory, and no percentile is off by one per cent."""
    seeded, values = random.Random(3), []
    found = Histogram()
    for _ in range(20_000):
        values.append(int(seeded.lognormvariate(12, 2)))
        found.add(values[-1])
    values.sort()
    got = found.distribution()
    assert got is not None
    assert len(found._counts) < 8000
    for percent, shown in ((50, got.p50), (90, got.p90), (99, got.p99)):
        exact = values[-(-len(values) * percent // 100) - 1]
        assert 0.99 * exact <= shown <= exact
    assert (got.smallest, got.largest) == (values[0], values[-1])


def test_every_value_is_in_one_bar() -> None:
    """The bars' counts add up, and round edges contain all values, with and without a long tail."""
    for values in ([0], [5] * 9, [995, 1005], range(300, 4000), [1, 2, 3, 10**6], [0, 0, 99_999]):
        found = histogram(*values).distribution()
        assert found is not None
        assert sum(bar.count for bar in found.bars) == len(values)
        assert found.bars[0].low <= min(values) < found.bars[0].high
        assert found.bars[-1].low <= max(values) < found.bars[-1].high
        assert len(found.bars) <= 24


def test_no_value_no_distribution() -> None:
    """An empty histogram has no distribution, and its median is 0."""
    assert Histogram().distribution() is None
    assert Histogram().median == 0


def test_tokens_are_spread_over_the_time_that_a_row_ran() -> None:
    """Tokens of a row of 4 seconds are in the bins of these seconds; the row counts at its end."""
    line = Timeline(16)
    line.add(100.0, 104.0, "ok", (400, 40, 8))
    found = line.throughput()
    assert found.width_seconds == 1
    assert [bin.completion_tokens for bin in found.bins] == [2, 2, 2, 2, 0]
    assert [bin.ok for bin in found.bins] == [0, 0, 0, 0, 1]
    assert sum(bin.prompt_tokens for bin in found.bins) == 400


def test_bins_become_wider_and_lose_nothing() -> None:
    """However long a batch runs, there are no more bins than allowed, and all rows are in them."""
    line, seeded = Timeline(60), random.Random(5)
    for _ in range(3000):
        end = 10**9 + seeded.random() * 5 * 86_400
        line.add(end - 90 * seeded.random(), end, seeded.choice(["ok", "failed"]), (10, 5, 3))
    found = line.throughput()
    assert len(found.bins) <= 60
    assert sum(bin.ok + bin.failed for bin in found.bins) == 3000
    assert round(sum(bin.completion_tokens for bin in found.bins)) == 9000
    assert all(b.at - a.at == found.width_seconds for a, b in zip(found.bins, found.bins[1:]))  # noqa: B905


def test_bins_do_not_overlap() -> None:
    """The first bin begins with the first row. Each ends where the next one begins."""
    line = Timeline(16)
    line.add(100.7, 103.0, "ok", (0, 0, 23))
    found = line.throughput().bins
    begins = [max(one.at, 100.7) for one in found]
    ends = [round(at + one.seconds, 6) for at, one in zip(begins, found, strict=True)]
    assert ends == [*begins[1:], 104.0]
    assert {round(one.completion_tokens / one.seconds, 6) for one in found[:-1]} == {10.0}


def test_a_pause_is_no_active_time() -> None:
    """Two stretches of work with an hour between them are as long as the two."""
    line = Timeline(1000)
    line.add(0.5, 10.0, "ok", (1, 0, 1))
    line.add(3600.0, 3610.0, "failed", (0, 0, 0))
    line.add(3600.0, 3620.0, "ok", (1, 0, 1))
    assert 28 <= line.active_seconds <= 40


def test_a_wrong_clock_stops_nothing() -> None:
    """A row of another century is left out; the other rows stay."""
    line = Timeline(16)
    line.add(1000.0, 1001.0, "ok", (1, 0, 1))
    line.add(1e12, 1e12, "ok", (1, 0, 1))
    line.add(1000.0, 1002.0, "ok", (1, 0, 1))
    assert sum(bin.ok for bin in line.throughput().bins) == 2
    assert line.width_seconds == 1
