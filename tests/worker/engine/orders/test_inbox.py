"""The inbox alone: what overtakes what, and where a cancelled row is dropped."""

from __future__ import annotations

import math
import threading
import time

import pytest

from batchkv_producer.wire.job import Request, SamplingParams
from batchkv_worker.engine.orders.inbox import (
    Cancel,
    Failed,
    Inbox,
    Recall,
    Row,
    Serve,
    Stop,
    Taken,
)
from batchkv_worker.events import Work


def work(job_id: str, *, is_live: bool = False, n: int | None = None) -> Work:
    params = SamplingParams(n=n)
    request = Request(custom_id=job_id, endpoint="completion", prompt="p", params=params)
    return Work(job_id, request, is_live=is_live)


def works(*names: str) -> list[Work]:
    return [work(name) for name in names]


def ahead() -> Inbox:
    """An inbox whose rows are prepared, here by the test."""
    inbox = Inbox()
    inbox.begin_ahead()
    return inbox


def prepare(inbox: Inbox, count: int = 1) -> None:
    for _ in range(count):
        put(inbox, taken(inbox))


def taken(inbox: Inbox) -> Taken:
    """The next row to prepare."""
    found = inbox.next_raw()
    assert found is not None
    return found


def put(inbox: Inbox, *prepared: Taken) -> None:
    for one in prepared:
        inbox.put(one, lambda: None)


def rows(inbox: Inbox) -> list[str]:
    """The rows that come now, in order."""
    found = []
    while isinstance(order := inbox.next(), Row):
        found.append(order.work.job_id)
    assert order is None
    return found


def test_rows_come_in_their_order_and_live_ones_first() -> None:
    """Of an engine that prepares ahead or not; live rows overtake where rows wait, twice."""
    plain = Inbox()
    plain.add([*works("a", "b"), work("l1", is_live=True), work("l2", is_live=True)])
    assert rows(plain) == ["l1", "l2", "a", "b"]
    inbox = ahead()
    inbox.add(works("a", "b", "c"))
    prepare(inbox, 2)
    inbox.add([work("l1", is_live=True)])
    prepare(inbox)
    assert rows(inbox) == ["l1", "a", "b"]
    prepare(inbox)
    assert rows(inbox) == ["c"]


def test_rows_that_came_before_the_engine_was_built_are_prepared_too() -> None:
    """Rows may be added while the engine loads."""
    inbox = Inbox()
    inbox.add(works("a", "b"))
    inbox.begin_ahead()
    assert (inbox.num_raw, inbox.num_rows) == (2, 2)
    assert inbox.next() is None
    prepare(inbox)
    assert (inbox.num_raw, inbox.num_rows, inbox.num_prepared) == (1, 2, 1)
    assert rows(inbox) == ["a"]


@pytest.mark.parametrize("is_ahead", [False, True])
def test_all_other_orders_overtake_rows(is_ahead: bool) -> None:
    """A stop does not wait for rows, and a recall finds those that were added before it."""
    inbox = ahead() if is_ahead else Inbox()
    inbox.add(works("a"))
    for order in (recall := Recall(("a",), 1), Serve("x"), Stop()):
        inbox.give(order)
    assert [inbox.next(), inbox.next(), inbox.next()] == [recall, Serve("x"), Stop()]


def test_a_row_is_dropped_wherever_it_is() -> None:
    """Waiting, being prepared or prepared: then the engine hears nothing of it."""
    inbox = ahead()
    inbox.add(works("ready", "current", "raw", "left"))
    prepare(inbox)
    current = taken(inbox)
    assert current.work == work("current")
    for name in ("ready", "current", "raw"):
        inbox.cancel(name)
    assert inbox.num_rows == 1
    put(inbox, current)
    assert rows(inbox) == []
    prepare(inbox)
    assert rows(inbox) == ["left"]


def test_rows_that_are_prepared_at_once_come_in_their_order() -> None:
    """Whichever is prepared first. One that was dropped is not waited for once it is prepared."""
    inbox = ahead()
    inbox.add(works("a", "b", "c", "d"))
    a, b, c, d = (taken(inbox) for _ in range(4))
    assert (inbox.num_raw, inbox.num_rows) == (4, 4)
    put(inbox, b, c)
    assert (inbox.num_raw, inbox.num_rows, inbox.num_prepared) == (4, 4, 2)
    assert rows(inbox) == []
    inbox.cancel("c")
    assert (inbox.num_raw, inbox.num_rows) == (3, 3)
    put(inbox, a)
    assert (inbox.num_raw, inbox.num_rows) == (1, 3)
    assert rows(inbox) == ["a", "b"]
    put(inbox, d)
    assert rows(inbox) == ["d"]


def test_a_live_row_waits_for_no_row_of_a_batch() -> None:
    """Long prompts of a batch are being prepared when it comes. Two live rows keep their order."""
    inbox = ahead()
    inbox.add(works("long"))
    long = taken(inbox)
    inbox.add([work("b"), work("l1", is_live=True), work("l2", is_live=True)])
    first, second, other = (taken(inbox) for _ in range(3))
    assert [one.work.job_id for one in (first, second, other)] == ["l1", "l2", "b"]
    put(inbox, second, other)
    assert rows(inbox) == []
    put(inbox, first)
    assert rows(inbox) == ["l1", "l2"]
    put(inbox, long)
    assert rows(inbox) == ["long", "b"]


def test_rows_that_are_prepared_at_once_are_recalled_the_last_first() -> None:
    """Also those that are prepared and wait for one before them. Each is recalled once."""
    inbox = ahead()
    inbox.add(works("a", "b", "c"))
    held = [taken(inbox) for _ in range(3)]
    put(inbox, held[1])
    every = Recall(("a", "b", "c"), 2)
    assert inbox.recall(every) == (["c", "b"], 0)
    assert inbox.recall(every) == (["a"], 1)
    put(inbox, held[0], held[2])
    assert rows(inbox) == [] and inbox.num_rows == 0


def test_a_dropped_row_holds_up_nobody() -> None:
    """Its preparation may take for ever. It may come again meanwhile, and is then the new one."""
    inbox = ahead()
    inbox.add([*works("a", "b"), work("l1", is_live=True), work("l2", is_live=True)])
    stuck, waiting, old, other = (taken(inbox) for _ in range(4))
    put(inbox, waiting, other)
    assert rows(inbox) == [] and inbox.held_up == (stuck, old)
    inbox.cancel("l1")
    assert rows(inbox) == ["l2"] and inbox.held_up == (old,)
    assert inbox.recall(Recall(("a",), 1)) == (["a"], 0)
    assert rows(inbox) == ["b"] and inbox.held_up == ()
    inbox.add(works("a"))
    new, done = taken(inbox), list[str]()
    inbox.put(new, lambda: done.append("new"))
    inbox.put(old, lambda: done.append("old"))
    order = inbox.next()
    assert isinstance(order, Row) and order.add is not None
    order.add()
    assert done == ["new"] and inbox.next() is None


def test_a_row_may_be_cancelled_twice_while_it_is_prepared() -> None:
    """It came again in between, and waits behind a row that is still prepared."""
    inbox = ahead()
    inbox.add(works("a", "b"))
    first, old = taken(inbox), taken(inbox)
    inbox.cancel("b")
    inbox.add(works("b"))
    new = taken(inbox)
    inbox.cancel("b")
    put(inbox, first, old, new)
    assert rows(inbox) == ["a"]


def test_a_row_may_come_again_after_it_was_cancelled() -> None:
    """The engine cancels the one that it has before it gets the new one."""
    inbox = ahead()
    inbox.add(works("a"))
    prepare(inbox)
    assert rows(inbox) == ["a"]
    inbox.cancel("a")
    inbox.add(works("a"))
    prepare(inbox)
    assert inbox.next() == Cancel("a")
    assert rows(inbox) == ["a"]


def test_a_recall_takes_the_last_rows_first() -> None:
    """Rows that nothing was done for go before prepared ones. Each choice of a row counts."""
    inbox = ahead()
    inbox.add([*works("ready", "kept", "current", "raw"), work("many", n=3), work("last")])
    prepare(inbox, 2)
    current = taken(inbox)
    assert current.work == work("current")
    wanted = ("ready", "current", "raw", "many", "last", "unknown")
    assert inbox.recall(Recall(wanted, 3)) == (["last", "raw", "current"], 0)
    put(inbox, current)
    assert inbox.recall(Recall(wanted, 4)) == (["many", "ready"], 0)
    assert inbox.recall(Recall(wanted, 4)) == ([], 4)
    assert rows(inbox) == ["kept"]


def test_a_wait_for_rows_ends_when_there_are_none_to_prepare() -> None:
    """The last one may be cancelled meanwhile; then there is nothing to wait for."""
    inbox = ahead()
    assert inbox.next(math.inf) is None
    inbox.add(works("a"))
    assert inbox.next(time.monotonic() + 0.01) is None
    timer = threading.Timer(0.05, inbox.cancel, ["a"])
    timer.start()
    assert inbox.next(math.inf) == Cancel("a") or inbox.num_rows == 0
    timer.join()


def test_a_wait_ends_with_any_order_or_row() -> None:
    """Also with a row that is not prepared: the engine then waits for it, and does not rest."""
    for give in (
        lambda one: one.give(Stop()),
        lambda one: one.add(works("a")),
        lambda one: one.cancel("a"),
        lambda one: one.fail(ValueError()),
    ):
        inbox = ahead()
        assert not inbox.wait(0.01)
        timer = threading.Timer(0.02, give, [inbox])
        timer.start()
        assert inbox.wait(60)
        timer.join()


def test_after_a_stop_no_row_is_prepared() -> None:
    """And a closed inbox has nothing, whatever is being prepared."""
    for end in (lambda one: one.give(Stop()), Inbox.close):
        inbox = ahead()
        inbox.add(works("a", "b"))
        current = taken(inbox)
        end(inbox)
        assert inbox.next_raw() is None
    put(inbox, current)
    assert inbox.num_rows == 0
    assert inbox.next() is None


def test_the_end_of_the_preparing_thread_is_told_first() -> None:
    """Before rows that are still here."""
    inbox = ahead()
    inbox.add(works("a", "b"))
    prepare(inbox)
    inbox.fail(fault := ValueError("gone"))
    assert inbox.next() == Failed(fault)
