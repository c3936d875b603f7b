"""The engine's thread: orders in, notices out, and a notice for each way to end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import pairwise

import pytest

from batchkv_producer.wire.job import Request
from batchkv_worker.engine import thread
from batchkv_worker.engine.thread import EngineThread, LoadFailed, Notice, Ready, Wake
from batchkv_worker.errors import ModelError
from batchkv_worker.events import Completed, EngineDied, EngineLike, Event, Work
from support.fake_engine import FakeEngine, FakePlan


def work(job_id: str, prompt: str = "hello") -> Work:
    return Work(job_id, Request(custom_id=job_id, endpoint="completion", prompt=prompt))


def collect(engine: EngineThread, num: int, timeout_seconds: float = 5.0) -> list[Notice]:
    """The next ``num`` notices, in order."""
    found: list[Notice] = []
    deadline = time.monotonic() + timeout_seconds
    while len(found) < num:
        assert time.monotonic() < deadline, f"only {found}"
        found += engine.notices(0.2)
    return found


def started(factory: Callable[[], EngineLike] | None = None) -> EngineThread:
    engine = EngineThread(factory or (lambda: FakeEngine(4, 2, FakePlan())))
    engine.start()
    return engine


def test_ready_comes_first_and_tells_the_capacity() -> None:
    """The main thread gets Ready before all other notices, with the number of rows to pull."""
    engine = started()
    assert collect(engine, 1) == [Ready()]
    assert (engine.num_slots, engine.max_in_flight) == (4, 6)
    engine.stop()
    assert engine.join(5)


def test_rows_come_back_as_they_end() -> None:
    """Each row is answered once, whatever the order."""
    engine = started()
    collect(engine, 1)
    engine.add([work("long", "slow:30"), work("short")])
    ids = [notice.job_id for notice in collect(engine, 2) if isinstance(notice, Completed)]
    assert ids == ["short", "long"]
    engine.stop()
    assert engine.join(5)


def test_a_cancelled_row_is_not_answered() -> None:
    """After cancel no event comes, and the slot is free."""
    engine = started(lambda: FakeEngine(1, 1, FakePlan(step_seconds=0.005)))
    collect(engine, 1)
    engine.add([work("long", "slow:100000"), work("next")])
    engine.cancel("long")
    [event] = collect(engine, 1)
    assert isinstance(event, Completed)
    assert event.job_id == "next"
    engine.stop()
    assert engine.join(5)


def test_all_calls_come_from_one_thread() -> None:
    """The engine is built, driven and closed on its own thread, as MLX requires."""
    seen: set[int] = set()

    class Watching(FakeEngine):
        def step(self):  # type: ignore[no-untyped-def]
            seen.add(threading.get_ident())
            return super().step()

        def close(self) -> None:
            seen.add(threading.get_ident())

    def build() -> EngineLike:
        seen.add(threading.get_ident())
        return Watching(4, 2, FakePlan())

    engine = started(build)
    engine.add([work("a")])
    collect(engine, 2)
    engine.stop()
    assert engine.join(5)
    assert len(seen) == 1
    assert seen != {threading.get_ident()}


def test_an_idle_engine_costs_no_steps() -> None:
    """Without work the thread sleeps in its inbox."""
    engine = started()
    collect(engine, 1)
    time.sleep(0.1)
    assert engine.num_steps == 0
    engine.stop()
    assert engine.join(5)


def test_an_engine_that_stays_idle_gives_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Again and again while it is idle, never while it has rows; it takes work as before."""
    monkeypatch.setattr(thread, "IDLE_SECONDS", 0.02)
    rests: list[bool] = []

    class Resting(FakeEngine):
        def rest(self) -> None:
            rests.append(self.is_idle)

    engine = started(lambda: Resting(4, 2, FakePlan()))
    collect(engine, 1)
    deadline = time.monotonic() + 5
    while len(rests) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    engine.add([work("a", "slow:20")])
    [event] = collect(engine, 1)
    assert isinstance(event, Completed) and all(rests)
    assert engine.num_steps > 0
    engine.stop()
    assert engine.join(5)


def test_a_device_that_failed_is_no_death_of_a_row() -> None:
    """The engine ends all the same, and the notice says why."""
    engine = started()
    engine.add([work("a", "device fault")])
    _, death = collect(engine, 2)
    assert isinstance(death, EngineDied) and death.is_device_fault
    assert "Innocent Victim" in death.reason
    assert engine.join(5)


def test_an_exception_in_a_step_is_the_engines_death() -> None:
    """The last notice has the reason, and the thread has ended."""
    engine = started()
    engine.add([work("a", "crash")])
    _, death = collect(engine, 2)
    assert death == EngineDied("RuntimeError: crashed as asked")
    assert engine.join(5)
    assert engine.has_ended


def test_a_model_error_at_load_is_configuration() -> None:
    """It is reported as LoadFailed, so that no death of a job is counted."""
    engine = started(lambda: FakeEngine(1, 1, FakePlan(load_error="no such model")))
    [notice] = collect(engine, 1)
    assert isinstance(notice, LoadFailed)
    assert isinstance(notice.error, ModelError)
    assert engine.join(5)


def test_any_other_fault_at_load_is_a_death() -> None:
    """A broken installation is not the user's configuration."""
    engine = started(lambda: FakeEngine(1, 1, FakePlan(load_error="crash")))
    assert collect(engine, 1) == [EngineDied("RuntimeError: the loader broke")]
    assert engine.join(5)


def test_wake_ends_a_wait_at_once() -> None:
    """A signal handler can bring the main loop to its next turn within milliseconds."""
    engine = EngineThread(lambda: FakeEngine(1, 1, FakePlan()))
    threading.Timer(0.05, engine.wake).start()
    begun = time.monotonic()
    assert engine.notices(60) == [Wake()]
    assert time.monotonic() - begun < 30


def test_notices_without_waiting() -> None:
    """A timeout of zero only looks."""
    engine = EngineThread(lambda: FakeEngine(1, 1, FakePlan()))
    assert engine.notices(0) == []


class SlowToPrepare(FakeEngine):
    """Each row takes 10 ms to prepare; notes how many rows it held at each step."""

    def __init__(self) -> None:
        super().__init__(32, 0, FakePlan(steps=3, step_seconds=0.01))
        self.held: list[int] = []

    def add(self, work: Work) -> None:
        time.sleep(0.01)
        super().add(work)

    def step(self) -> list[Event]:
        self.held.append(len(self.seen))
        return super().step()


def test_rows_that_are_handed_over_together_start_together() -> None:
    """An engine without rows takes in all of them first, so that they also end together."""
    built = SlowToPrepare()
    engine = started(lambda: built)
    collect(engine, 1)
    engine.add([work(f"first {number}") for number in range(12)])
    collect(engine, 12)
    assert built.held[0] == 12
    engine.stop()
    assert engine.join(5)


def test_rows_that_decode_do_not_wait_for_many_new_ones() -> None:
    """Between two steps of rows that decode only a few new ones are taken in; none is left out."""
    built = SlowToPrepare()
    engine = started(lambda: built)
    collect(engine, 1)
    engine.add([work("long", "slow:100000")])
    while not built.held:
        time.sleep(0.001)
    engine.add([work(f"new {number}") for number in range(20)])
    collect(engine, 20)
    grown = [after - before for before, after in pairwise(built.held)]
    assert max(grown) < 20
    assert len(built.seen) == 21
    engine.stop()
    assert engine.join(5)
