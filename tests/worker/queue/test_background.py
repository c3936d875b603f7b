"""Calls of Redis beside the engine: what they return, and what goes on until they do."""

from __future__ import annotations

import threading

import pytest

from batchkv_worker.queue.background import Beside


def test_the_engine_is_looked_after_until_the_answer_comes() -> None:
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

    beside = Beside(is_awake.set, meanwhile)
    assert beside(call) is not threading.current_thread()
    assert turns == [threading.current_thread()] * 3
    beside.close()


def test_what_a_call_raises_is_raised_here() -> None:
    """An outage is the session's to wait out, not the thread's."""
    beside = Beside(lambda: None, lambda: None)
    with pytest.raises(ZeroDivisionError):
        beside(lambda: 1 / 0)
    beside.close()


def test_a_closed_one_calls_at_once() -> None:
    """When the worker leaves there is no engine to look after: the call is made here and now."""
    beside = Beside(lambda: None, lambda: pytest.fail("there is no engine"))
    beside.close()
    assert beside(threading.current_thread) is threading.current_thread()
