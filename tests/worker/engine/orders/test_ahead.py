"""Rows are prepared on other threads while the engine computes, and nothing else changes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from batchkv_producer.wire.job import Request, SamplingParams
from batchkv_worker.engine import thread
from batchkv_worker.engine.engine import Engine, EngineConfig
from batchkv_worker.engine.orders import ahead
from batchkv_worker.engine.thread import EngineThread, Notice, Ready
from batchkv_worker.events import (
    Completed,
    EngineDied,
    Event,
    PreparesAhead,
    Recalled,
    Rejected,
    Work,
)
from batchkv_worker.trace import IDLE, PREPARE
from support import tiny_models
from support.fake_engine import FakeEngine, FakePlan


def work(job_id: str, prompt: str = "hello", **params: Any) -> Work:
    values = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **params})
    request = Request(job_id, "completion", prompt=prompt, params=values, style="raw")
    return Work(job_id, request)


def works(*names: str) -> list[Work]:
    return [work(name) for name in names]


def live(job_id: str) -> Work:
    return replace(work(job_id), is_live=True)


class Gated(FakeEngine):
    """Prepares a row only after ``let`` has let it; notes how many rows it held at each step."""

    prepares_ahead = 4

    def __init__(self, slots: int = 4, **plan: Any) -> None:
        super().__init__(slots, 16, FakePlan(**plan))
        self.gate = threading.Semaphore(0)
        self.begun: list[str] = []
        self.held: list[int] = []

    def prepare(self, work: Work) -> Callable[[], None]:
        self.begun.append(work.job_id)
        self.gate.acquire()
        return lambda: self.add(work)

    def let(self, count: int = 1) -> None:
        self.gate.release(count)

    def step(self) -> list[Event]:
        self.held.append(len(self.seen))
        return super().step()


class Broken(Gated):
    """Cannot prepare the row "bad"."""

    def __init__(self, fault: BaseException) -> None:
        super().__init__()
        self.fault = fault

    def prepare(self, work: Work) -> Callable[[], None]:
        if work.job_id == "bad":
            raise self.fault
        return super().prepare(work)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepares rows, however many processors there are. Tests of several ask for them."""
    use_threads(monkeypatch, 1)


def use_threads(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(thread, "num_threads", lambda: count)


@contextmanager
def running(built: PreparesAhead | Callable[[], PreparesAhead]) -> Iterator[EngineThread]:
    """The thread of this engine, which ends behind the block."""
    engine = EngineThread(built if callable(built) else lambda: built)
    engine.start()
    assert collect(engine, 1) == [Ready()]
    try:
        yield engine
    finally:
        if isinstance(built, Gated):
            built.let(1000)
        engine.stop()
        assert engine.join(10)


def collect(engine: EngineThread, num: int) -> list[Notice]:
    """The next ``num`` notices, in order."""
    found: list[Notice] = []
    deadline = time.monotonic() + 20
    while len(found) < num:
        assert time.monotonic() < deadline, f"only {found}"
        found += engine.notices(0.2)
    return found


def until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def tiny_engine() -> Engine:
    config = EngineConfig("float", slots=4, memory_bytes=2**27, path="fused", group_cost=64)
    loaded = tiny_models.loaded_chat(tiny_models.build("llama"), "qwen3")
    return Engine(loaded, config)


def test_the_engine_computes_while_a_row_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer hangs in one row, and another one gets all of its tokens. Both answers are
    those of an engine that prepares its rows itself."""
    alone, want = tiny_engine(), {}
    rows = [work("first", "some text", max_tokens=20), work("held up", "other text")]
    for one in rows:
        alone.add(one)
    while not alone.is_idle:
        want |= {event.job_id: event for event in alone.step() if isinstance(event, Completed)}
    alone.close()
    entered, gate = threading.Event(), threading.Event()
    tokenizer = tiny_models.loaded_chat(tiny_models.build("llama"), "qwen3").tokenizer._tokenizer
    encode = tokenizer.encode

    def slow(text: str, **options: Any) -> list[int]:
        if text == "other text":
            entered.set()
            assert gate.wait(20)
        return list(encode(text, **options))

    monkeypatch.setattr(tokenizer, "encode", slow)
    monkeypatch.setattr(thread, "FIRST_ORDERS_SECONDS", 0.05)
    with running(tiny_engine) as engine:
        engine.add(rows)
        [first] = collect(engine, 1)
        assert entered.is_set() and engine.progress().num_waiting == 1
        gate.set()
        [second] = collect(engine, 1)
    for event in (first, second):
        assert isinstance(event, Completed)
        assert event.token_ids == want[event.job_id].token_ids


def test_a_refused_row_has_its_event() -> None:
    """A row that cannot be prepared is rejected, and the next one is computed."""
    with running(tiny_engine) as engine:
        engine.add([work("wrong", logprobs=99), work("right")])
        found = {event.job_id: event for event in collect(engine, 2)}
    refused = found["wrong"]
    assert isinstance(refused, Rejected) and "logprobs" in refused.message
    assert isinstance(found["right"], Completed)


def test_an_engine_whose_tokenizer_holds_the_interpreter_prepares_rows_itself() -> None:
    """A tokenizer in Python gains nothing on another thread, and nobody says that it is safe."""

    def build() -> Engine:
        config = EngineConfig("float", slots=4, memory_bytes=2**27, path="fused", group_cost=64)
        built = Engine(tiny_models.loaded(tiny_models.build("llama")), config)
        assert isinstance(built, PreparesAhead) and not built.prepares_ahead
        return built

    with running(build) as engine:
        engine.add([work("a", "1 2 3")])
        [event] = collect(engine, 1)
        assert isinstance(event, Completed)
        assert not any(one.name.startswith("batchkv-ahead") for one in threading.enumerate())


def test_rows_come_to_the_engine_in_their_order() -> None:
    """Rows of several orders, too; all are prepared on one thread, which is not the engine's."""
    threads: set[str] = set()

    class Watching(Gated):
        def prepare(self, work: Work) -> Callable[[], None]:
            threads.add(threading.current_thread().name)
            return super().prepare(work)

    built = Watching()
    built.let(20)
    with running(built) as engine:
        names = [f"row {number}" for number in range(20)]
        engine.add(works(*names[:7]))
        engine.add(works(*names[7:]))
        collect(engine, 20)
        assert built.seen == built.begun == names
    assert threads == {"batchkv-ahead-0"}


def test_rows_of_several_threads_come_to_the_engine_in_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four prompts at once. The first ones take longest."""
    use_threads(monkeypatch, 4)
    at_once = threading.Barrier(4)

    class Watching(Gated):
        def prepare(self, work: Work) -> Callable[[], None]:
            number = int(work.job_id)
            if number < 4:
                at_once.wait(20)  # none goes on alone
                time.sleep(0.02 * (4 - number))
            return super().prepare(work)

    built = Watching()
    built.let(40)
    with running(built) as engine:
        names = [str(number) for number in range(40)]
        engine.add(works(*names))
        collect(engine, 40)
        assert built.seen == names


def test_several_threads_make_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of a chat template, answers with a format, calls, and stop strings, all at once,
    with a real tokenizer: the rows are those that one thread makes."""
    engine = tiny_engine()
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    asked = [
        Work(
            f"{number}",
            Request(
                f"{number}",
                "chat",
                messages=[{"role": "user", "content": f"row {number} " + "words " * number}],
                params=SamplingParams(max_tokens=8, stop=("end",), bad_words=("no",)),
                tools=tools if number % 3 == 0 else None,
                tool_choice="required" if number % 3 == 0 else None,
            ),
        )
        for number in range(60)
    ]
    monkeypatch.setattr(engine, "submit_row", lambda row, *rest: made.append((row, *rest)))

    def facts(row: Any, *rest: Any) -> Any:
        return row.job_id, row.prompt, row.generation, type(row.reader), rest

    made: list[Any] = []
    for one in asked:
        engine.prepare(one)()
    want = [facts(*one) for one in made]
    assert len({tuple(prompt) for _, prompt, *_ in want}) == 60
    made.clear()
    with ThreadPoolExecutor(4) as threads:
        for add in threads.map(engine.prepare, asked):
            add()
    assert [facts(*one) for one in made] == want
    engine.close()


@pytest.mark.parametrize("fault", [ValueError("no"), SystemExit(3)])
def test_the_end_of_one_of_several_threads_is_the_engines_death(
    monkeypatch: pytest.MonkeyPatch, fault: BaseException
) -> None:
    """While the others prepare; they end with the engine."""
    use_threads(monkeypatch, 3)

    built = Broken(fault)
    with running(built) as engine:
        engine.add(works("held", "bad", "late"))
        [death] = collect(engine, 1)
        assert isinstance(death, EngineDied)
        built.let(3)
        until(lambda: engine.join(20))


def test_a_machine_with_few_processors_has_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each four processors, and four at most."""
    for cpus, want in ((1, 1), (4, 1), (8, 2), (10, 2), (16, 4), (128, 4)):
        allowed = set(range(cpus))
        monkeypatch.setattr(
            ahead.os, "sched_getaffinity", lambda _, found=allowed: found, raising=False
        )
        assert ahead.num_threads() == want
    monkeypatch.delattr(ahead.os, "sched_getaffinity")  # as on macOS
    for count, want in ((None, 1), (12, 3)):
        monkeypatch.setattr(ahead.os, "cpu_count", lambda count=count: count)
        assert ahead.num_threads() == want


def test_a_tokenizer_for_one_thread_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many the machine could have."""
    use_threads(monkeypatch, 4)
    built = Gated()
    built.prepares_ahead = 1
    with running(built) as engine:
        engine.add(works("a", "b"))
        until(lambda: built.begun)
        time.sleep(0.05)
        assert built.begun == ["a"]
        built.let(2)
        collect(engine, 2)


def test_a_row_that_hangs_is_named_while_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the watchdog: steps are made, for live rows are computed."""
    use_threads(monkeypatch, 2)
    built = Gated()
    stuck = threading.Event()
    prepare = built.prepare

    def hanging(work: Work) -> Callable[[], None]:
        if work.job_id == "stuck":
            assert stuck.wait(20)
        return prepare(work)

    monkeypatch.setattr(built, "prepare", hanging)
    built.let(3)
    with running(built) as engine:
        engine.add(works("stuck"))
        until(lambda: engine.held_up)
        before = engine.held_up
        engine.add([live("l")])
        [event] = collect(engine, 1)
        assert isinstance(event, Completed) and event.job_id == "l"
        assert engine.held_up == before
        stuck.set()
        collect(engine, 1)
        assert engine.held_up == ()


def test_the_trace_of_several_threads_is_one_track(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its phase is prepare while any thread prepares a row."""
    use_threads(monkeypatch, 2)
    phases: list[str | None] = []
    monkeypatch.setattr(ahead.AHEAD, "enter", phases.append)
    built = Gated()
    with running(built) as engine:
        engine.add(works("a", "b"))
        until(lambda: len(built.begun) == 2)
        built.let(1)
        collect(engine, 1)
        assert set(phases[1:]) == {PREPARE}
        built.let(1)
        collect(engine, 1)
        until(lambda: phases[-1] == IDLE)
    assert phases[0] == IDLE and phases[-1] is None and phases.count(None) == 1


def test_live_rows_are_prepared_before_rows_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row at which the thread is comes first. A live row then starts at once: the engine does
    not wait for rows of the batch to start with it."""
    monkeypatch.setattr(thread, "FIRST_ORDERS_SECONDS", 60)
    built = Gated()
    with running(built) as engine:
        engine.add(works("a", "b", "c"))
        until(lambda: built.begun)
        engine.add([live("l")])
        built.let(2)
        found = {event.job_id for event in collect(engine, 2)}
        assert found == {"a", "l"}
        built.let(2)
        collect(engine, 2)
        assert built.begun == ["a", "l", "b", "c"]
        assert built.held[0] == 2


def test_a_row_that_is_not_prepared_can_be_cancelled() -> None:
    """Waiting or half done, it never comes to the engine. It may come again."""
    built = Gated()
    with running(built) as engine:
        engine.add(works("half", "waits", "kept"))
        until(lambda: built.begun)
        engine.cancel("half")
        engine.cancel("waits")
        engine.add(works("half"))
        built.let(3)
        found = {event.job_id for event in collect(engine, 2)}
        assert found == {"kept", "half"}
        assert built.begun == ["half", "kept", "half"]
        assert built.seen == ["kept", "half"]


def test_rows_that_are_not_prepared_are_recalled_first() -> None:
    """Then those that wait in the engine; the rows that it computes stay."""
    built = Gated(slots=1)
    with running(built) as engine:
        built.let(2)
        engine.add([work("computed", "slow:100000"), work("waits")])
        until(lambda: len(built.seen) == 2 and built.held)
        engine.add(works("half", "raw"))
        until(lambda: "half" in built.begun)
        for count, ids in ((1, ("raw",)), (2, ("half", "waits")), (1, ())):
            engine.recall(["computed", "waits", "half", "raw"], count)
            assert collect(engine, 1) == [Recalled(ids)]
        engine.cancel("computed")
        assert built.seen == ["computed", "waits"]


@pytest.mark.parametrize("fault", [ValueError("no"), SystemExit(3)])
def test_the_end_of_the_preparing_thread_is_the_engines_death(fault: BaseException) -> None:
    """Whatever ended it: its rows go back to the queue, and none waits for ever."""

    built = Broken(fault)
    with running(built) as engine:
        built.let(1)
        engine.add([work("good", "slow:100000"), work("bad"), work("late")])
        [death] = collect(engine, 1)
        assert isinstance(death, EngineDied) and not death.is_device_fault
        assert f"prepares rows ended: {type(fault).__name__}: {fault}" in death.reason
        until(lambda: engine.has_ended)


def test_a_stop_does_not_wait_for_a_long_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine ends. ``join`` says that a row is still being prepared, until it is not."""
    monkeypatch.setattr(thread, "AHEAD_STOP_SECONDS", 0.01)
    built = Gated()
    with running(built) as engine:
        engine.add(works("long", "next"))
        until(lambda: built.begun)
        engine.stop()
        until(lambda: engine.has_ended)
        assert not engine.join(20)
        built.let(2)
        until(lambda: engine.join(20))
        assert built.begun == ["long"] and not built.seen


def test_the_first_rows_wait_until_the_slots_are_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 20 rows for 8 slots no step begins before 8 are prepared, and the others are not
    waited for."""
    monkeypatch.setattr(thread, "FIRST_ORDERS_SECONDS", 60)
    built = Gated(slots=8)
    with running(built) as engine:
        engine.add(works(*map(str, range(20))))
        built.let(7)
        until(lambda: len(built.seen) == 7)
        time.sleep(0.05)
        assert not built.held
        built.let(1)
        collect(engine, 8)
        assert built.held[0] == 8 and len(built.begun) == 9
        built.let(12)
        collect(engine, 12)


def test_the_first_rows_start_when_all_are_prepared_or_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fewer rows than slots wait for each other, but no longer than the limit."""
    built = Gated(slots=8)
    with running(built) as engine:
        engine.add(works("a", "b", "c"))
        built.let(3)
        collect(engine, 3)
        assert built.held[0] == 3
        held = len(built.held)
        monkeypatch.setattr(thread, "FIRST_ORDERS_SECONDS", 0.05)
        engine.add(works("d", "e"))
        built.let(1)
        [event] = collect(engine, 1)
        assert isinstance(event, Completed) and event.job_id == "d"
        assert built.held[held] == 4
        built.let(1)
        collect(engine, 1)


def test_rows_on_their_way_are_counted() -> None:
    """They wait as the others do for those who look; each that is prepared is progress."""
    built = Gated()
    with running(built) as engine:
        engine.add(works("a", "b", "c"))
        until(lambda: built.begun)
        before = engine.num_steps
        progress, figures = engine.progress(), engine.figures()
        assert progress is not None and progress.num_waiting == 3
        assert figures is not None and figures.levels["rows.waiting"] == 3
        assert "3 rows on their way to it, 3 not prepared" in engine.report()
        built.let(1)
        until(lambda: built.seen)
        assert engine.num_steps > before
        built.let(2)
        collect(engine, 3)
