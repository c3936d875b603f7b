"""What a clock says of several ways to compute the same."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import mlx.core as mx
import pytest

from batchkv_worker.kv import timing


class Clock:
    """Stands still, but for what is computed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.calls: list[str] = []
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def way(self, name: str, *seconds: float, refuses_at: int = -1) -> Callable[[], mx.array]:
        """What takes so long at its first, second, ... call, and then as long as at the last."""
        turns = count()

        def run() -> mx.array:
            turn = next(turns)
            self.calls.append(name)
            if turn == refuses_at:
                raise RuntimeError("no kernel")
            self.now += seconds[min(turn, len(seconds) - 1)]
            return mx.zeros(1)

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_the_least_counts_but_not_the_first(clock: Clock) -> None:
    """What the machine does besides only adds; and the first time may be of another kind."""
    way = clock.way("a", 0.001, 5.0, 0.25, 3.0)
    assert timing.least_times([way], repeats=3) == pytest.approx([250.0])


def test_each_has_its_turn_in_good_seconds_and_bad_ones(clock: Clock) -> None:
    """The machine is slow for the first half: who had that alone would lose."""
    one, other = clock.way("a", *[0.2] * 3, 0.02), clock.way("b", *[0.1] * 3, 0.01)
    assert timing.least_times([one, other], repeats=4) == pytest.approx([20.0, 10.0])
    assert clock.calls == ["a", "b"] * 5


def test_short_ones_are_started_together(clock: Clock) -> None:
    assert timing.least_times([clock.way("a", 0.1)], repeats=1, times=4) == pytest.approx([400.0])
    assert clock.calls == ["a"] * 8


@pytest.mark.parametrize("turn", [0, 1, 3])
def test_what_is_refused_has_no_time_and_is_not_asked_again(clock: Clock, turn: int) -> None:
    ways = [clock.way("a", 0.1), clock.way("b", 0.2, refuses_at=turn), clock.way("c", 0.3)]
    assert timing.least_times(ways, repeats=3) == [pytest.approx(100.0), None, pytest.approx(300.0)]
    assert clock.calls.count("b") == turn + 1


def test_a_gain_is_a_ratio_and_none_if_either_is_refused(clock: Clock) -> None:
    assert timing.gain(clock.way("a", 0.3), clock.way("b", 0.2)) == pytest.approx(1.5)
    assert timing.gain(clock.way("a", 0.3, refuses_at=0), clock.way("b", 0.2)) == 0
    assert timing.gain(clock.way("a", 0.3), clock.way("b", 0.2, refuses_at=2)) == 0


def test_what_is_timed_is_computed() -> None:
    """A graph alone takes no time: the arrays have to be there."""
    made: list[mx.array] = []

    def run() -> mx.array:
        made.append(mx.ones((64, 64)) @ mx.ones((64, 64)))
        return made[-1]

    before = mx.get_active_memory()
    (spent,) = timing.least_times([run], repeats=1)
    assert spent is not None
    assert spent > 0
    assert mx.get_active_memory() - before >= 2 * 64 * 64 * 4
