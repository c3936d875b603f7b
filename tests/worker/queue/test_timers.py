"""The session's small clocks, and the ways of being asked to stop."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import pytest
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from batchkv_worker.errors import EXIT_ORPHANED
from batchkv_worker.queue.redis_side import is_outage
from batchkv_worker.queue.stop import StopRequest
from batchkv_worker.queue.timers import RedisOutage, Timer
from batchkv_worker.queue.watchdog import Watchdog
from batchkv_worker.settings import WorkerSettings
from support.worker_harness import wait_until


class Clock:
    """A hand-driven ``time.monotonic``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (RedisConnectionError("refused"), True),
        (RedisTimeoutError("slow"), True),
        (BusyLoadingError("loading"), True),
        (AuthenticationError("password changed"), True),
        (ReadOnlyError("replica"), True),
        (OutOfMemoryError("full"), True),
        (ResponseError("MISCONF Errors writing to the AOF file"), True),
        (ResponseError("OOM command not allowed, script: x, on @user_script:1."), True),
        (NoPermissionError("no permissions to run"), False),
        (ResponseError("user_script:12: attempt to concatenate a nil value"), False),
    ],
)
def test_what_is_waited_for(fault: RedisError, expected: bool) -> None:
    """Faults that pass are waited out; faults of ours or of the set-up are not."""
    assert is_outage(fault) is expected


def test_an_outage_is_retried_with_growing_pauses(clock: Clock) -> None:
    """Pauses double up to a bound; the first success ends the outage."""
    outage, calls = RedisOutage(), [0]

    def fail() -> None:
        calls[0] += 1
        raise RedisConnectionError("refused")

    pauses = []
    for _ in range(8):
        outage.attempt(fail)
        pauses.append(round(outage.retry_at - clock.now, 3))
        outage.attempt(fail)  # too early: not called
        clock.now = outage.retry_at
    assert calls == [8]
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0]
    assert outage.is_on
    outage.attempt(lambda: None)
    assert not outage.is_on


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (OutOfMemoryError("command not allowed"), "Redis takes no writes (command not allowed)"),
        (ReadOnlyError("You can't write"), "Redis takes no writes"),
        (ResponseError("MISCONF errors writing to disk"), "Redis takes no writes (MISCONF"),
        (RedisConnectionError("refused"), "Redis is away (refused)"),
    ],
)
def test_a_full_server_is_not_called_away(
    fault: RedisError, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The log tells a server that is full from one that does not answer."""

    def fail() -> None:
        raise fault

    RedisOutage().attempt(fail)
    assert told in caplog.text


def test_a_fault_of_ours_is_raised() -> None:
    """An error that waiting does not cure ends the session."""

    def fail() -> None:
        raise ResponseError("user_script:12: attempt to index a nil value")

    with pytest.raises(ResponseError):
        RedisOutage().attempt(fail)


def test_a_timer_is_due_at_once_and_then_every_so_often() -> None:
    """The first time comes immediately."""
    timer = Timer(15)
    assert timer.is_due(1000)
    timer.restart(1000)
    assert not timer.is_due(1014)
    assert timer.is_due(1015)


def watch(
    clock: Clock, watchdog: Watchdog, seconds: int, steps: int, held_up: Sequence[object] = ()
) -> bool:
    """Look once a second; whether it ever said that the engine hangs."""
    hung = False
    for _ in range(seconds):
        clock.now += 1
        hung = watchdog.is_hung(steps, True, held_up) or hung
    return hung


def test_the_watchdog_counts_from_the_last_step(clock: Clock) -> None:
    """Work without a step for longer than the limit is a hang; each step starts anew."""
    watchdog = Watchdog(WorkerSettings("m", engine_timeout_seconds=10, load_timeout_seconds=60))
    assert not watch(clock, watchdog, 9, steps=1)
    assert not watch(clock, watchdog, 9, steps=2)
    assert not watchdog.is_hung(2, has_work=False)
    assert not watch(clock, watchdog, 9, steps=2)
    assert watch(clock, watchdog, 3, steps=2)


def test_a_row_that_is_prepared_for_ever_is_a_hang(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Though others are computed meanwhile. Each row has the whole limit, and a closed lid does
    not count."""
    watchdog = Watchdog(WorkerSettings("m", engine_timeout_seconds=10))
    for steps in range(30):
        assert not watch(clock, watchdog, 1, steps, ("batch", f"live {steps}")[steps % 2 :])
        clock.now += 0.0 if steps else 8 * 3600
    for steps in range(30, 40):
        assert not watch(clock, watchdog, 1, steps, ("batch", "live"))
    assert watch(clock, watchdog, 3, 40, ("batch", "live"))
    with caplog.at_level("CRITICAL"):
        watchdog.dump("report", ["a"])
    assert "a row has been in preparation for" in caplog.text


def test_loading_has_its_own_limit(clock: Clock) -> None:
    """Before the first step the longer limit holds."""
    watchdog = Watchdog(WorkerSettings("m", engine_timeout_seconds=10, load_timeout_seconds=60))
    assert not watch(clock, watchdog, 59, steps=0)
    assert watch(clock, watchdog, 2, steps=0)


def test_a_closed_lid_is_not_a_hang(clock: Clock) -> None:
    """Hours between two looks count as seconds: the process was not running."""
    watchdog = Watchdog(WorkerSettings("m", engine_timeout_seconds=10))
    assert not watch(clock, watchdog, 3, steps=1)
    clock.now += 8 * 3600
    assert not watch(clock, watchdog, 1, steps=1)


def test_signals_within_a_second_are_one_wish(clock: Clock) -> None:
    """A terminal and a parent both send one: that is a warm stop, not a cold one."""
    wakes: list[int] = []
    stop = StopRequest(lambda: wakes.append(1))
    assert not stop.is_asked
    stop.on_signal(2, None)
    stop.on_signal(15, None)
    assert stop.is_asked
    assert not stop.is_cold
    clock.now += 1
    stop.on_signal(15, None)
    assert stop.is_cold
    assert len(wakes) == 3


def test_an_orphan_leaves_even_when_stuck() -> None:
    """When the parent's pipe ends, the flag is set; later the process is ended by force."""
    reading, writing = os.pipe()
    codes: list[int] = []
    stop = StopRequest(lambda: None)
    stop.watch_parent(reading, grace_seconds=0.05, hard_exit=codes.append)
    os.write(writing, b"ignored")
    time.sleep(0.05)
    assert not stop.is_orphaned
    os.close(writing)
    wait_until(lambda: codes == [EXIT_ORPHANED])
    assert stop.is_orphaned
    assert stop.is_asked
    os.close(reading)
