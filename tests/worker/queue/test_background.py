"""Calls of Redis in the background: what they return, and what goes on until they do."""

from __future__ import annotations

import threading

import pytest

from batchkv_worker.queue.background import Background


def test_the_engine_is_served_until_the_answer_comes() -> None:
    """The call runs on another thread; its end wakes the caller, who gets what it returned."""
    turns, is_awake, may_answer = [], threading.Event(), threading.Event()

    def meanwhile() -> None:
        turns.append(threading.current_thread())
        if len(turns) == 3:
            may_answer.set()
            assert is_awake.wait(10)

    def call() -> threading.Thread:
        assert may_answer.wait(10)
        return threading.current_thread()

    background = Background(is_awake.set)
    assert background.run(call, meanwhile) is not threading.current_thread()
    assert turns == [threading.current_thread()] * 3
    background.close()


def test_what_a_call_raises_is_raised_here() -> None:
    """An outage is the session's to wait out, not the thread's."""
    background = Background(lambda: None)
    with pytest.raises(ZeroDivisionError):
        background.run(lambda: 1 / 0, lambda: None)
    background.close()


def test_a_closed_one_calls_at_once() -> None:
    """When the worker leaves there is no engine to serve: the call is made here and now."""
    background = Background(lambda: None)
    background.close()
    here = background.run(threading.current_thread, lambda: pytest.fail("there is no engine"))
    assert here is threading.current_thread()
