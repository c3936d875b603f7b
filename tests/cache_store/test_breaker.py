"""The circuit breaker opens after several failures and allows one call after each cooldown."""

from __future__ import annotations

from batchkv_cache_store.breaker import Breaker


class Clock:
    """A clock that the test sets."""

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
    """Two failures and a success do not open it; three failures do."""
    clock = Clock()
    breaker = Breaker(3, 5.0, 15.0, clock)
    for _ in range(5):
        breaker.failed()
        breaker.failed()
        breaker.succeeded()
    assert breaker.is_closed and breaker.may_call()
    assert not opened(clock).is_closed


def test_one_probe_after_the_cooldown_closes_it() -> None:
    """While open it allows no call; after the cooldown one, and its success closes it."""
    clock = Clock()
    breaker = opened(clock)
    clock.now += 4.9
    assert not breaker.may_call()
    clock.now += 0.2
    assert [breaker.may_call() for _ in range(3)] == [True, False, False]
    breaker.succeeded()
    assert all(breaker.may_call() for _ in range(3))


def test_failed_probes_wait_longer() -> None:
    """Each failed probe doubles the cooldown, up to its maximum; a success resets it."""
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
    """After a probe whose thread died, another call is allowed later."""
    clock = Clock()
    breaker = opened(clock)
    clock.now += 5.1
    assert breaker.may_call() and not breaker.may_call()
    clock.now += 5.1
    assert breaker.may_call()


def test_it_cools_down_until_a_call_is_allowed() -> None:
    """It cools down only while it is open, and not in the moment of the probe."""
    clock = Clock()
    assert not Breaker(3, 5.0, 15.0, clock).is_cooling_down
    breaker = opened(clock)
    assert breaker.is_cooling_down
    clock.now += 5
    assert not breaker.is_cooling_down
    assert breaker.may_call() and breaker.is_cooling_down
    breaker.succeeded()
    assert not breaker.is_cooling_down
