"""Which of many waiting batches the gateway looks at."""

from __future__ import annotations

from batchkv_gateway.batches.driver import Turns


def test_each_batch_has_its_turn() -> None:
    """Seven batches are looked at in three rounds of three, and then from the first one again."""
    turns, ids = Turns(3), list("abcdefg")
    assert [turns.next(ids) for _ in range(4)] == [
        ["a", "b", "c"],
        ["d", "e", "f"],
        ["g", "a", "b"],
        ["c", "d", "e"],
    ]


def test_few_batches_are_all_looked_at_once() -> None:
    """No batch is chosen twice in a round, and without batches nothing is chosen."""
    turns = Turns(3)
    assert turns.next([]) == []
    assert sorted(turns.next(["a", "b"])) == sorted(turns.next(["a", "b"])) == ["a", "b"]


def test_batches_that_come_and_go_change_no_turn() -> None:
    """The batch after the last one is next, also when that one has ended meanwhile."""
    turns = Turns(2)
    assert turns.next(list("abcde")) == ["a", "b"]
    assert turns.next(list("acdef")) == ["c", "d"]
    assert turns.next(list("ef")) == ["e", "f"]
