"""Decided first, installed in one step, and undone."""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx
import pytest

from batchkv_worker.errors import ModelError
from batchkv_worker.kv.backends.cpu.rope_cache import CachedRoPE
from batchkv_worker.kv.start import plan
from batchkv_worker.kv.start.decision import Fixed, decide
from support import tiny_models
from worker.kv.crowd import Crowd
from worker.kv.reference import x86

State = tuple[list[type], list[Any]]


def state_of(model: Any) -> State:
    """What may be changed of a model: its layers' classes, and functions that its modules name."""
    kinds = [type(module) for module in model.modules()]
    named = [
        getattr(sys.modules[name], "swiglu", None) for name in sorted({k.__module__ for k in kinds})
    ]
    return kinds, named


@pytest.fixture
def model() -> Any:
    """As mlx-lm has it, whatever an engine before did to its module."""
    plan.restore(found := tiny_models.build("llama"))
    return found


def decided(model: Any) -> Any:
    caches = tiny_models.loaded(model).caches
    what = ("tiny", model, caches, "affine8", mx.float32, x86())
    return decide(*what, slots=2, fixed=Fixed("fused", 1))


def test_deciding_changes_nothing_and_installing_is_undone(model: Any) -> None:
    """The model is changed by one step alone, and is afterwards as it was."""
    before = state_of(model)
    decision = decided(model)
    assert len(decision.changes) == 2
    assert state_of(model) == before
    undo = decision.install(model)
    assert state_of(model) != before
    assert CachedRoPE in state_of(model)[0]
    undo()
    assert state_of(model) == before


def test_a_closed_engine_leaves_the_model_as_it_was(model: Any) -> None:
    """So does one that is closed after another was made of the same model: that one goes on."""
    before = state_of(model)
    first, second = Crowd(model), Crowd(model)
    first.engine.close()
    assert CachedRoPE in state_of(model)[0]
    second.engine.close()
    assert state_of(model) == before


def test_a_model_that_is_refused_is_as_it_was(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was installed is undone where the check on a few tokens fails."""

    def refuse(*_: Any) -> Any:
        assert CachedRoPE in state_of(model)[0]
        raise ModelError("gives something else in a batch")

    before = state_of(model)
    monkeypatch.setattr(plan, "find_traits", refuse)
    with pytest.raises(ModelError):
        Crowd(model)
    assert state_of(model) == before
