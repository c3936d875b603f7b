"""The circuit breaker: opens after several failures, asks once after each cooldown."""

from __future__ import annotations

from batchkv_cache_store.breaker import Breaker


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def opened(clock: Clock) -> Breaker:
    """A breaker that has just opened."""
    breaker = Breaker(3, 5.0, 15.0, clock)
    for _ in range(3):
        assert breaker.may_call()
        breaker.failed()
    return breaker


def test_it_opens_after_failures_in_a_row() -> None:
    """Two failures and a success are no reason; three failures are."""
    clock = Clock()
    breaker = Breaker(3, 5.0, 15.0, clock)
    for _ in range(5):
        breaker.failed()
        breaker.failed()
        breaker.succeeded()
    assert breaker.is_closed and breaker.may_call()
    assert not opened(clock).is_closed


def test_one_probe_after_the_cooldown_closes_it() -> None:
    """While open nobody asks; after the cooldown one may, and its success lets all."""
    clock = Clock()
    breaker = opened(clock)
    clock.now += 4.9
    assert not breaker.may_call()
    clock.now += 0.2
    assert [breaker.may_call() for _ in range(3)] == [True, False, False]
    breaker.succeeded()
    assert all(breaker.may_call() for _ in range(3))


def test_failed_probes_wait_longer() -> None:
    """Each failed probe doubles the cooldown, up to its maximum; a success starts anew."""
    clock = Clock()
    breaker = opened(clock)
    for cooldown in (5.0, 10.0, 15.0, 15.0):
        clock.now += cooldown - 0.1
        assert not breaker.may_call()
        clock.now += 0.2
        assert breaker.may_call()
        breaker.failed()
    clock.now += 20
    assert breaker.may_call()
    breaker.succeeded()
    for _ in range(3):
        breaker.failed()
    clock.now += 5.1
    assert breaker.may_call()


def test_a_probe_that_never_reports_is_replaced() -> None:
    """A probe whose thread died does not keep the tier out of use."""
    clock = Clock()
    breaker = opened(clock)
    clock.now += 5.1
    assert breaker.may_call() and not breaker.may_call()
    clock.now += 5.1
    assert breaker.may_call()


def test_it_cools_down_until_a_call_is_allowed() -> None:
    """Closed it does not rest; open it does, but for the moment of the probe."""
    clock = Clock()
    assert not Breaker(3, 5.0, 15.0, clock).is_cooling_down
    breaker = opened(clock)
    assert breaker.is_cooling_down
    clock.now += 5
    assert not breaker.is_cooling_down
    assert breaker.may_call() and breaker.is_cooling_down
    breaker.succeeded()
    assert not breaker.is_cooling_down
