"""Which models hand dense keys and values on unread: found on a few tokens."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from batchkv_worker.kv.layers.discover import AttentionShape, discover
from batchkv_worker.kv.layers.kinds import AttentionKind
from batchkv_worker.kv.start.decision import Fixed
from batchkv_worker.kv.start.plan import KvPlan, make_plan
from support import tiny_models
from worker.kv.reference import x86


def plan_of(model: Any, scheme: str = "affine8") -> KvPlan:
    fixed = Fixed("fused", 256, 768)
    tree = discover("tiny", model)
    return make_plan("tiny", model, tree, scheme, mx.float32, x86(), slots=4, fixed=fixed)


def read_kinds(plan: KvPlan) -> list[bool]:
    return [kind.is_read for kind in plan.kinds if isinstance(kind, AttentionKind)]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_models_that_hand_arrays_on_get_stand_ins(family: str) -> None:
    """They call the attention function with the arrays, and nothing else."""
    assert not any(read_kinds(plan_of(tiny_models.build(family))))


def test_a_model_that_reads_keys_gets_them() -> None:
    """Latent attention multiplies with the arrays before it calls the function."""
    assert all(read_kinds(plan_of(tiny_models.build("deepseek_v3"))))


def test_one_number_that_is_read_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that adds nothing but a zeroth part of a key is found."""
    model = tiny_models.build("llama")
    assert not any(read_kinds(plan_of(model)))
    module = __import__(type(model).__module__, fromlist=["x"])
    hooked = module.scaled_dot_product_attention

    def reading(queries: Any, keys: Any, values: Any, **rest: Any) -> Any:
        return hooked(queries, keys, values, **rest) + 0 * keys[:, :1, :1, :1]

    kind = type(model.layers[0].self_attn)
    call = kind.__call__

    def calling(self: Any, *args: Any, **kwargs: Any) -> Any:
        plain = module.scaled_dot_product_attention
        module.scaled_dot_product_attention = reading
        try:
            return call(self, *args, **kwargs)
        finally:
            module.scaled_dot_product_attention = plain

    monkeypatch.setattr(kind, "__call__", calling)
    assert all(read_kinds(plan_of(model)))


def test_an_index_over_tokens_is_always_read() -> None:
    """Its model reads it only when there are many tokens, so a few do not show it."""
    model = tiny_models.build("deepseek_v32")
    plan = plan_of(model)
    indexes = [
        kind.is_read
        for kind, leaf in zip(plan.kinds, plan.tree.leaves, strict=True)
        if isinstance(kind, AttentionKind) and isinstance(leaf, AttentionShape) and leaf.is_index
    ]
    assert indexes and all(indexes)
