"""Which queue of a worker with adapters has its turn."""

from __future__ import annotations

from batchkv_worker.queue.runs.queue_turns import (
    BARREN_SECONDS,
    MAX_BARREN_SECONDS,
    Head,
    QueueTurns,
)

HIGH, NORMAL, LOW = 0, 1, 2


def turns() -> QueueTurns:
    return QueueTurns(["base", "a", "b"])


def test_the_oldest_batch_comes_first() -> None:
    """The queue of the oldest batch is served, whatever queue was served before."""
    heads = {"base": Head(NORMAL, 30), "a": Head(NORMAL, 10), "b": Head(NORMAL, 20)}
    of_three = turns()
    assert of_three.choose(heads, 0.0) == "a"
    of_three.current = "a"
    assert of_three.choose({**heads, "a": Head(NORMAL, 40)}, 0.0) == "b"
    assert of_three.choose({}, 0.0) == "a"  # nothing waits: no exchange


def test_a_priority_comes_before_age() -> None:
    """A row of a high batch comes first, one of a low batch last."""
    heads = {"base": Head(NORMAL, 10), "a": Head(LOW, 1), "b": Head(HIGH, 99)}
    assert turns().choose(heads, 0.0) == "b"
    del heads["b"]
    assert turns().choose(heads, 0.0) == "base"


def test_equal_batches_cause_no_exchange() -> None:
    """Batches of one second: the queue that is served is served on."""
    of_three = turns()
    of_three.current = "b"
    assert of_three.choose(dict.fromkeys(of_three.queues, Head(NORMAL, 5)), 0.0) == "b"


def test_a_queue_of_jobs_for_others_is_left_for_a_while() -> None:
    """Old rows that this worker may not compute keep no other queue from its turn."""
    of_three = turns()
    heads = {"base": Head(NORMAL, 1), "a": Head(NORMAL, 2)}
    now, pause = 100.0, BARREN_SECONDS
    for _ in range(8):
        assert of_three.choose(heads, now) == "base"
        of_three.note_pull(has_jobs=False, has_entries=True, now=now)
        of_three.note_pull(has_jobs=False, has_entries=True, now=now)  # the same pause
        assert of_three.choose(heads, now + pause - 0.1) == "a"
        now += pause
        pause = min(2 * pause, MAX_BARREN_SECONDS)
    assert pause == MAX_BARREN_SECONDS
    of_three.note_pull(has_jobs=True, has_entries=True, now=now)
    of_three.note_pull(has_jobs=False, has_entries=True, now=now)
    assert of_three.choose(heads, now + BARREN_SECONDS) == "base"


def test_an_empty_queue_is_not_left() -> None:
    """A pull that found nothing in an empty queue says nothing about later jobs."""
    of_three = turns()
    of_three.note_pull(has_jobs=False, has_entries=False, now=0.0)
    assert of_three.choose({"base": Head(NORMAL, 1), "a": Head(NORMAL, 2)}, 0.0) == "base"
