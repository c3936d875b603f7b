"""Layers of one input are multiplied at once: the same answers, and nothing else of the model."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from batchkv_worker import blas
from batchkv_worker.kv import joint, narrow, siblings
from batchkv_worker.store.identity import weights_digest
from kv.crowd import Crowd, model_of, random_prompt

ROWS = 6
SIZE = 64


class Toy(nn.Module):
    """Layers that read the same input, and some that only seem to."""

    def __init__(self) -> None:
        super().__init__()
        mx.random.seed(3)
        self.table = nn.Embedding(16, SIZE)
        self.q = nn.Linear(SIZE, 96, bias=False)
        self.k = nn.Linear(SIZE, 32, bias=False)
        self.v = nn.Linear(SIZE, 48, bias=False)
        self.gate = nn.Linear(SIZE, 80)
        self.up = nn.Linear(SIZE, 80)
        self.packed_gate = nn.QuantizedLinear(SIZE, 32, bias=False, bits=4)
        self.packed_up = nn.QuantizedLinear(SIZE, 64, bias=False, bits=4)
        self.other_bits = nn.QuantizedLinear(SIZE, 32, bias=False, bits=8)
        self.other_dtype = nn.Linear(SIZE, 32, bias=False)
        self.other_dtype.set_dtype(mx.bfloat16)
        self.other_input = nn.Linear(SIZE, 32, bias=False)
        self.twice = nn.Linear(SIZE, 32, bias=False)
        self.head = nn.Linear(SIZE, 16, bias=False)
        for module in self.modules():
            if "bias" in module:
                module.bias = mx.random.normal(module.bias.shape)

    def make_cache(self) -> list[Any]:
        return []

    def parts(self, x: mx.array) -> dict[str, mx.array]:
        names = ("q", "k", "v", "gate", "up", "packed_gate", "packed_up")
        others = ("other_bits", "other_dtype", "twice", "twice")
        found = {name: self[name](x) for name in (*names, *others)}
        return {**found, "other_input": self.other_input(x + 0)}

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        parts = self.parts(self.table(tokens))
        sums = sum(part.astype(mx.float32).sum(axis=-1, keepdims=True) for part in parts.values())
        return self.head(self.table(tokens) + sums)


FAMILIES = [("q", "k", "v"), ("gate", "up"), ("packed_gate", "packed_up")]


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """One product wins every comparison, on every machine."""
    monkeypatch.setattr(joint, "is_faster", lambda *shape: True)


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So do weights in blocks."""
    monkeypatch.setattr(narrow, "_is_faster", lambda *shape: True)
    monkeypatch.setattr(blas, "is_openblas", lambda: True)


@pytest.fixture
def without_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def family_of(toy: Toy, name: str) -> siblings.Family:
    family: siblings.Family = toy[name]._family
    return family


def test_only_layers_of_one_input_and_one_kind_are_a_family(faster: None) -> None:
    toy = Toy()
    assert siblings.install(toy, ROWS) == len(FAMILIES)
    for names in FAMILIES:
        assert len({id(family_of(toy, name)) for name in names}) == 1
        assert [toy[name]._place for name in names] == list(range(len(names)))
    alone = ("other_bits", "other_dtype", "other_input", "twice", "head")
    assert {type(toy[name]) for name in alone} == {nn.Linear, nn.QuantizedLinear}


@pytest.mark.parametrize("is_narrow", [True, False])
def test_answers_and_parameters_stay_what_they_were(
    is_narrow: bool, faster: None, blocks: None
) -> None:
    toy = Toy()
    few, many = mx.random.normal((ROWS, 1, SIZE)), mx.random.normal((1, ROWS + 1, SIZE))
    before = toy.parts(few), toy.parts(many)
    names = [name for name, _ in tree_flatten(toy.parameters())]
    digest = weights_digest(toy)

    if is_narrow:
        narrow.install(toy, mx.float32, ROWS)
    assert siblings.install(toy, ROWS) == len(FAMILIES)

    for x, expected in zip((few, many), before, strict=True):
        for name, part in toy.parts(x).items():
            assert part.shape == expected[name].shape
            assert mx.allclose(part, expected[name], atol=1e-5).item(), name
    assert [name for name, _ in tree_flatten(toy.parameters())] == names
    assert weights_digest(toy) == digest
    assert "_blocks" not in toy.q


@pytest.mark.parametrize("is_narrow", [True, False])
def test_one_product_serves_few_rows_alone(is_narrow: bool, faster: None, blocks: None) -> None:
    """Which of both serves shows when one is spoilt."""
    toy = Toy()
    if is_narrow:
        narrow.install(toy, mx.float32, ROWS)
    siblings.install(toy, ROWS)
    for names in FAMILIES:
        family = family_of(toy, names[0])
        whole = family._product
        family._product = lambda x, whole=whole: [part * mx.nan for part in whole(x)]
    for shape, is_spoilt in (((ROWS, 1, SIZE), True), ((1, ROWS + 1, SIZE), False)):
        parts = toy.parts(mx.ones(shape))
        for name in sum(FAMILIES, ()):
            assert mx.isnan(parts[name]).all().item() == is_spoilt
            assert mx.isnan(parts[name]).any().item() == is_spoilt


def test_who_is_asked_something_else_multiplies_itself(faster: None) -> None:
    toy = Toy()
    x, y = mx.random.normal((2, 1, SIZE)), mx.random.normal((2, 1, SIZE))
    plain = {(name, n): toy[name](z) for name in FAMILIES[0] for n, z in enumerate((x, y))}
    siblings.install(toy, ROWS)
    orders = [
        [("k", 0), ("q", 0), ("v", 1), ("k", 0)],
        [("v", 0), ("q", 1), ("k", 0), ("v", 1), ("k", 1)],
        [("q", 0), ("q", 1), ("k", 1), ("k", 0), ("v", 1)],
        [("q", 0), ("k", 0), ("k", 0), ("v", 0)],
    ]
    for order in orders:
        for name, n in order:
            assert mx.allclose(toy[name]((x, y)[n]), plain[name, n], atol=1e-5).item(), order


def test_nothing_is_held_once_all_were_asked(faster: None) -> None:
    toy = Toy()
    siblings.install(toy, ROWS)
    family = family_of(toy, "q")
    x = mx.random.normal((2, 1, SIZE))
    for name in FAMILIES[0][:-1]:
        toy[name](x)
    assert family._input is x
    toy.v(x)
    assert family._input is None
    assert not family._parts
    toy.q(x)
    toy.q(mx.zeros((ROWS + 1, 1, SIZE)))  # more rows: nobody else will be asked for these
    assert family._input is None


def test_weights_stand_once(faster: None, without_collection: None) -> None:
    """Whatever read them on the way is gone, and not only when Python gets round to it."""
    toy = Toy()
    mx.eval(toy.parameters())
    mx.clear_cache()
    before = mx.get_active_memory()
    siblings.install(toy, ROWS)
    more = mx.get_active_memory() - before
    assert more < toy.k.weight.nbytes
    assert mx.get_cache_memory() < toy.q.weight.nbytes


def test_a_second_engine_of_the_model_decides_anew(
    faster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = Toy()
    x = mx.random.normal((2, 1, SIZE))
    plain = toy.parts(x)
    mx.eval(plain)
    for _ in range(2):
        siblings.forget(toy)
        assert {type(module) for module in toy.modules()} <= {
            *(Toy, nn.Embedding, nn.Linear, nn.QuantizedLinear),
        }
        assert not hasattr(toy.q, "_family")
        assert siblings.install(toy, ROWS) == len(FAMILIES)
        assert all(mx.allclose(toy.parts(x)[name], plain[name], atol=1e-5) for name in plain)
    siblings.forget(toy)
    monkeypatch.setattr(joint, "is_faster", lambda *shape: False)
    assert siblings.install(toy, ROWS) == 0
    assert type(toy.q) is nn.Linear


def test_products_that_answer_otherwise_are_not_kept(
    faster: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = joint.product_of

    def swapped(family: Any, whole: Any, rows: int) -> joint.Product:
        product = right(family, whole, rows)
        return lambda x: [part + 1000 for part in product(x)]

    monkeypatch.setattr(joint, "product_of", swapped)
    toy = Toy()
    with caplog.at_level(logging.WARNING, "batchkv.engine"):
        assert siblings.install(toy, ROWS) == 0
    assert "otherwise" in caplog.text
    assert type(toy.q) is nn.Linear


def test_blocks_of_a_family_belong_to_one_layer_each(blocks: None, faster: None) -> None:
    """Whatever sizes are narrow, sixteen columns go into all of them."""
    toy = Toy()
    few = mx.random.normal((ROWS, 1, SIZE))
    expected = toy.parts(few)
    narrow.install(toy, mx.float32, ROWS)
    assert {type(toy[name]) for name in FAMILIES[0]} == {narrow.NarrowLinear}
    assert narrow.columns_of(16, SIZE, ROWS) == 16
    assert siblings.install(toy, ROWS) == len(FAMILIES)
    for name in FAMILIES[0]:
        assert mx.allclose(toy.parts(few)[name], expected[name], atol=1e-5).item()


KINDS = [
    joint.Likeness(nn.Linear, 64, mx.float32, has_bias=False),
    joint.Likeness(nn.Linear, 64, mx.bfloat16, has_bias=True),
    joint.Likeness(narrow.NarrowLinear, 64, mx.float32, has_bias=True),
    joint.Likeness(nn.QuantizedLinear, 64, mx.float32, True, (4, 64, "affine")),
    joint.Likeness(nn.QuantizedLinear, 64, mx.bfloat16, False, (4, 32, "mxfp4")),
]


@pytest.mark.parametrize("like", KINDS, ids=str)
def test_the_measurement_ends_with_a_verdict(like: joint.Likeness) -> None:
    assert joint.is_faster(like, (64, 32), ROWS) in (True, False)


@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma3_text", "qwen3_next"])
def test_whole_engines_give_the_same_tokens_both_ways(
    family: str, is_quantized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = {f"row {n}": random_prompt(n, 30 + 37 * n) for n in range(5)}
    model = model_of(family)
    if is_quantized:
        model = type(model)(model.args)
        nn.quantize(model, group_size=32, bits=8)
    found, kinds = [], []
    for wins in (True, False):
        monkeypatch.setattr(joint, "is_faster", lambda *shape, wins=wins: wins)
        crowd: Any = Crowd(model, path="folded")
        for name, prompt in prompts.items():
            crowd.add(name, prompt)
        crowd.drain()
        found.append({name: crowd.tokens(name) for name in prompts})
        kinds.append({type(module) for module in crowd.model.modules()})
    assert found[0] == found[1]
    sibling = siblings.SiblingQuantizedLinear if is_quantized else siblings.SiblingLinear
    assert sibling in kinds[0]
    assert sibling not in kinds[1]
