"""What a host loads next, without processes and without a server."""

from __future__ import annotations

import math

import pytest

from batchkv_worker.queue.models.choice import Choice, Held, Queue, Rules, choose

APART = Rules((("a",), ("b",)), stay_seconds=30.0)
TOGETHER = Rules((("a", "b"), ("c",)), stay_seconds=30.0)
LOAD = {"a": 10.0, "b": 10.0, "c": 10.0}
IDLE = {"a": Held(0.0, is_ready=True)}


def test_the_first_model_is_the_one_with_most_rows_for_each_worker() -> None:
    """A model that nobody serves comes first, then the one with the most rows for each holder."""
    queues = {"a": Queue(900, num_holders=2), "b": Queue(500, num_holders=1)}
    assert choose(APART, {}, queues, LOAD, 0.0) == Choice("a")
    queues = {"a": Queue(900, num_holders=2), "b": Queue(5)}
    assert choose(APART, {}, queues, LOAD, 0.0) == Choice("b")


def test_a_host_without_rows_loads_what_fewest_others_hold_unless_it_ends_then() -> None:
    """Without rows it is made ready for some; with ``--burst`` it loads nothing."""
    queues = {"a": Queue(num_holders=2), "b": Queue(num_holders=1)}
    assert choose(APART, {}, queues, LOAD, 0.0) == Choice("b")
    lazy = Rules(APART.groups, APART.stay_seconds, is_eager=False)
    assert choose(lazy, {}, queues, LOAD, 0.0) is None
    assert choose(APART, {}, {}, LOAD, 0.0) is None


def test_a_model_s_work_ends_before_the_change() -> None:
    """Rows in the queue or under way, loading, and answers at once keep a model."""
    wanted = {"b": Queue(100)}
    assert choose(APART, IDLE, {"a": Queue(), **wanted}, LOAD, 60.0) == Choice("b", ("a",))
    for queue in (Queue(1), Queue(num_live=1), Queue(is_asked=True)):
        assert choose(APART, IDLE, {"a": queue, **wanted}, LOAD, 60.0) is None
    for held in (Held(0.0), Held(0.0, is_ready=True, is_busy=True)):
        assert choose(APART, {"a": held}, {"a": Queue(), **wanted}, LOAD, 60.0) is None


def test_a_model_stays_for_a_while() -> None:
    """The shortest stay begins with the newest load."""
    queues = {"a": Queue(), "b": Queue(100)}
    assert choose(APART, {"a": Held(40.0, is_ready=True)}, queues, LOAD, 60.0) is None
    assert choose(APART, {"a": Held(40.0, is_ready=True)}, queues, LOAD, 70.0) is not None


@pytest.mark.parametrize(
    ("holders", "seconds_left", "helps"),
    [
        (1, None, False),
        (1, 25.0, False),
        (1, 35.0, True),
        (1, math.inf, True),
        (3, 45.0, False),
        (3, 55.0, True),
    ],
)
def test_nobody_follows_others_for_a_few_rows(
    holders: int, seconds_left: float | None, helps: bool
) -> None:
    """A model that others hold is loaded only if its rows end sooner by more than the loading.

    It takes 10 s. With rows for 35 s, one more host ends them after 22.5 s.
    """
    queues = {"a": Queue(), "b": Queue(100, num_holders=holders, seconds_left=seconds_left)}
    assert (choose(APART, IDLE, queues, LOAD, 60.0) is not None) == helps


def test_models_that_fit_are_loaded_beside_each_other() -> None:
    """Then nothing ends, and neither rows nor the shortest stay delay it."""
    queues = {"a": Queue(50), "b": Queue(1), "c": Queue(900)}
    busy = {"a": Held(59.0, is_ready=True, is_busy=True)}
    assert choose(TOGETHER, busy, queues, LOAD, 60.0) == Choice("b")
    both = {"a": Held(0.0, is_ready=True), "b": Held(0.0, is_ready=True)}
    empty = {"a": Queue(), "b": Queue(), "c": Queue(900)}
    assert choose(TOGETHER, both, empty, LOAD, 60.0) == Choice("c", ("a", "b"))


def test_who_waits_for_an_answer_comes_before_rows() -> None:
    """Of two models that nobody serves, the one that somebody waits for is loaded."""
    queues = {"a": Queue(900), "b": Queue(num_live=1)}
    assert choose(APART, {}, queues, LOAD, 0.0) == Choice("b")
