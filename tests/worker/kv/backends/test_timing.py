"""What a clock says of several ways to compute the same."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from types import ModuleType
from typing import Any

import pytest

from batchkv_worker.kv.backends import timing
from batchkv_worker.kv.backends.cpu import exp2, rope_cache

REFUSED = -1.0


class Clock:
    """Stands still, but for what is computed: a way answers how many milliseconds it takes.

    ``slow`` is how many of the first computations take ten times as long.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now, self.slow = 100.0, 0
        self.calls: list[str] = []
        self.computed: list[list[float]] = []
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self._now)
        monkeypatch.setattr(timing.mx, "eval", self._compute)

    def _compute(self, found: list[float]) -> None:
        self.computed.append(found)
        if REFUSED in found:
            raise RuntimeError("no kernel")
        self._now += sum(found) / 1e3 * (10 if len(self.computed) <= self.slow else 1)

    def way(self, name: str, *spent: float) -> Callable[[], Any]:
        """What takes so long at its first, second, ... call, and then as long as at the last."""
        turns = count()

        def run() -> float:
            self.calls.append(name)
            return spent[min(next(turns), len(spent) - 1)]

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_building_does_not_count_where_graphs_are_built_before(clock: Clock) -> None:
    """A way takes 5 ms to build and 2 to compute."""
    way = clock.way("a", 2)

    def built() -> Any:
        clock._now += 5 / 1e3
        return way()

    assert timing.least_times([built], repeats=3) == pytest.approx([7])
    assert timing.least_times([built], repeats=3, is_built=True) == pytest.approx([2])
    assert timing.gain(built, way, is_built=True) == pytest.approx(1)


def test_the_least_counts_but_not_the_first(clock: Clock) -> None:
    """What the machine does besides only adds; and the first time may be of another kind."""
    assert timing.least_times([clock.way("a", 1, 50, 25, 30)], repeats=3) == pytest.approx([25])
    assert len(clock.calls) == 4


def test_each_has_its_turn_in_good_seconds_and_bad_ones(clock: Clock) -> None:
    """The machine is slow for the first half: who had that alone would lose."""
    clock.slow = 5
    one, other = clock.way("a", 2.0), clock.way("b", 2.1)
    assert timing.least_times([one, other], repeats=4) == pytest.approx([2.0, 2.1])
    assert clock.calls == ["a", "b"] * 5


def test_short_ones_are_started_together(clock: Clock) -> None:
    assert timing.least_times([clock.way("a", 1)], repeats=1, times=4) == pytest.approx([4])
    assert clock.computed == [[1] * 4] * 2


@pytest.mark.parametrize("turn", [0, 1, 3])
def test_what_is_refused_has_no_time_and_is_not_asked_again(clock: Clock, turn: int) -> None:
    """When it is computed, or already when it is built."""

    def unbuilt() -> float:
        clock.calls.append("d")
        if clock.calls.count("d") > turn:
            raise ValueError("no such shape")
        return 4

    refused = [*[2.0] * turn, REFUSED]
    ways = [clock.way("a", 1), clock.way("b", *refused), clock.way("c", 3), unbuilt]
    assert timing.least_times(ways, repeats=4) == [pytest.approx(1), None, pytest.approx(3), None]
    assert (clock.calls.count("b"), clock.calls.count("d")) == (turn + 1, turn + 1)


def test_of_what_takes_long_there_are_few_turns(clock: Clock) -> None:
    """But more than one beside the first, and the other has as many."""
    long = 600 * timing.MOST_SECONDS
    timing.least_times([clock.way("a", long), clock.way("b", 1)], repeats=50)
    assert clock.calls == ["a", "b"] * (1 + timing.LEAST_TURNS)
    clock.calls.clear()
    timing.least_times([clock.way("a", long / 10), clock.way("b", 1)], repeats=50)
    assert 1 + timing.LEAST_TURNS < clock.calls.count("a") == clock.calls.count("b") < 20


def test_compiling_does_not_use_up_the_turns(clock: Clock) -> None:
    """What the first turn takes is neither a time nor part of the limit."""
    compiled = clock.way("a", 2000 * timing.MOST_SECONDS, 5)
    assert timing.least_times([compiled], repeats=10) == pytest.approx([5])
    assert len(clock.calls) == 11


def test_a_gain_is_a_ratio_and_none_if_either_is_refused(clock: Clock) -> None:
    assert timing.gain(clock.way("a", 3), clock.way("b", 2)) == pytest.approx(1.5)
    assert timing.gain(clock.way("a", REFUSED), clock.way("b", 2)) == 0
    assert timing.gain(clock.way("a", 3), clock.way("b", 2, 2, REFUSED)) == 0


@pytest.mark.parametrize(
    ("module", "new", "ask"),
    [
        (exp2, "exp2", exp2.is_faster.__wrapped__),
        (rope_cache, "rotated", rope_cache.is_faster.__wrapped__),
    ],
    ids=["exp2", "rope cache"],
)
def test_what_is_new_is_timed_against_what_is_not(
    module: ModuleType, new: str, ask: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, real = [], getattr(module, new)
    monkeypatch.setattr(module, new, lambda *how: (asked.append(new), real(*how))[1])
    for won, verdict in ((3.0, True), (1.0, False), (0.0, False)):

        def play_gain(
            plain: Callable[[], Any], other: Callable[[], Any], won: float = won, **how: int
        ) -> float:
            asked.clear()
            plain()
            assert not asked
            other()
            assert asked == [new]
            return won

        monkeypatch.setattr(module, "gain", play_gain)
        assert ask() is verdict
