"""What doctor says of several models."""

from __future__ import annotations

from batchkv_producer.doctor.contract import Level
from batchkv_worker.doctor.together import GIB, judge
from batchkv_worker.queue.models.groups import Group


def test_what_fits_together_is_named_with_its_memory() -> None:
    """Models in one group are held together, groups in turn."""
    both = judge([Group(("a", "b"), 2 * GIB)], [])
    assert both.found.endswith("holds them together: a and b with 2.0 GiB for each")
    turns = judge([Group(("a", "b"), GIB), Group(("c",))], [])
    assert turns.found.endswith("holds in turn: a and b with 1.0 GiB for each; c")
    assert turns.level is Level.OK


def test_a_model_that_is_not_here_is_named() -> None:
    """Its size is not known, so nothing can be said."""
    assert "the size of owner/b is not known" in judge([], ["owner/b"]).found
