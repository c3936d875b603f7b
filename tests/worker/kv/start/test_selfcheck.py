"""The check on a few tokens before any job: what it refuses, and why."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from batchkv_worker.errors import ModelError
from batchkv_worker.kv.start import selfcheck
from support import tiny_models
from worker.kv.crowd import Crowd


def with_large_numbers() -> Any:
    """A model whose hidden numbers are beyond 65,504, the largest of float16."""
    model = tiny_models.build("llama")
    weight = model.model.layers[0].mlp.down_proj.weight
    model.model.layers[0].mlp.down_proj.weight = 1e6 * weight
    return model


def crowd_of(model: Any, dtype: mx.Dtype) -> Crowd:
    model.set_dtype(dtype)
    loaded = tiny_models.loaded

    def of_dtype(model: Any) -> Any:
        return loaded(model, dtype=dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_models, "loaded", of_dtype)
        return Crowd(model)


def test_numbers_beyond_float16_are_refused_with_a_dtype_that_serves() -> None:
    """The model is right in bfloat16, which has the range of float32."""
    with pytest.raises(ModelError, match="too large for float16: use --dtype bfloat16"):
        crowd_of(with_large_numbers(), mx.float16)
    crowd_of(with_large_numbers(), mx.bfloat16)


def test_a_model_in_range_is_served_in_float16() -> None:
    """A whole engine computes an answer in it."""
    crowd = crowd_of(tiny_models.build("llama"), mx.float16)
    crowd.add("a", [3, 4, 5])
    assert len(crowd.drain().tokens("a")) == 6


def test_rounded_products_have_a_tolerance_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A float32 model that differs by 1 % is refused, unless the device rounds its products."""
    monkeypatch.setattr(selfcheck, "disagreement", lambda *_: 0.01)
    with pytest.raises(ModelError, match=r"differ by 1\.0%"):
        crowd_of(tiny_models.build("llama"), mx.float32)
    monkeypatch.setattr(selfcheck, "is_rounded", lambda: True)
    crowd_of(tiny_models.build("llama"), mx.float32)
