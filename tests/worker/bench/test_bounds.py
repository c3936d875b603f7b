"""The least time that a model's work can take is counted from its own layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from mlx import nn
from mlx.utils import tree_flatten

from batchkv_worker.bench.bounds import Cost, Rates, cost_of
from support import tiny_models

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def test_every_weight_but_a_lookup_is_read_and_multiplied() -> None:
    """Of a dense model: all parameters of its layers, without the embedding that is looked up."""
    loaded = tiny_models.loaded(tiny_models.build("llama"))
    cost = cost_of(loaded)
    parameters = dict(tree_flatten(loaded.model.parameters()))
    embedding = parameters["model.embed_tokens.weight"]
    assert cost.weight_bytes == sum(p.nbytes for p in parameters.values()) - embedding.nbytes
    matrices = [p.size for p in parameters.values() if p.ndim == 2]
    assert cost.weights == sum(matrices) - embedding.size
    assert (cost.expert_bytes, cost.experts, cost.share) == (0, 0, 1.0)


def test_quantized_weights_count_by_numbers_and_by_bytes() -> None:
    """4 bits a number: as many products, about an eighth of the bytes of float32."""
    model = tiny_models.build("llama")
    before = cost_of(tiny_models.loaded(model))
    nn.quantize(model, 64, 4, class_predicate=lambda _, layer: isinstance(layer, nn.Linear))
    after = cost_of(tiny_models.loaded(model))
    assert after.weights == before.weights
    assert after.weight_bytes < before.weight_bytes / 6


def test_a_pass_is_bound_by_bytes_until_products_take_longer() -> None:
    """One token reads as much as many; keys and values are read on top."""
    rates = Rates(bytes_per_second=1e9, operations_per_second=1e12)
    cost = Cost(weight_bytes=10**9, weights=10**9)
    assert cost.seconds(1, rates) == cost.seconds(400, rates) == 1.0
    assert cost.seconds(1, rates, kv_bytes=5e8) == 1.5
    assert cost.seconds(1000, rates) == pytest.approx(2.0)


def test_of_experts_those_are_read_that_tokens_choose() -> None:
    """A token passes a share; many tokens together read nearly all."""
    rates = Rates(1e9, 1e15)
    cost = Cost(0, 0, expert_bytes=10**9, experts=10**9, share=0.125)
    assert cost.seconds(1, rates) == pytest.approx(0.125)
    assert 0.95 < cost.seconds(32, rates) < 1.0


def test_a_model_of_experts_is_counted_apart() -> None:
    """The share comes from the config: so many of so many experts a token."""
    loaded = replace(tiny_models.loaded(tiny_models.build("gpt_oss")), config=EXPERTS)
    cost = cost_of(loaded)
    assert cost.share == 0.5 and cost.experts > 0 and cost.expert_bytes >= 4 * cost.experts
    assert cost.weight_bytes > 0
    alone = cost_of(replace(loaded, config={}))
    assert alone.share == 1 and alone.weights == cost.weights + cost.experts
