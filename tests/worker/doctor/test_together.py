"""What doctor says of several models."""

from __future__ import annotations

import pytest

from batchkv_producer.doctor.contract import Level
from batchkv_worker.doctor.together import GIB, judge, look
from batchkv_worker.kv.backends.memory_budget import MemoryFacts
from batchkv_worker.model import footprint
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


def test_weights_that_stay_packed_leave_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU whose workers would unpack them, if nothing else is set."""
    machine = footprint.Machine(
        {"a": 3 * GIB, "b": 8 * GIB},
        {"a": 10 * GIB, "b": 30 * GIB},
        MemoryFacts("cuda", 128 * GIB, 80 * GIB),
    )
    monkeypatch.setattr(footprint, "read_machine", lambda *_: machine)
    monkeypatch.delenv("BATCHKV_WEIGHTS", raising=False)
    assert "a and b with 13.5 GiB for each, weights unpacked" in look(["a", "b"], "").found
    monkeypatch.setenv("BATCHKV_WEIGHTS", "packed ")
    assert "a and b with 28.0 GiB for each" in look(["a", "b"], "").found
