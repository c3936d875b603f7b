"""Layers of one input are multiplied at once: the same answers, and nothing else of the model."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.lora import LoRALinear

from batchkv_worker.kv.backends.generic import GenericBackend
from batchkv_worker.kv.backends.gpu import fused_linear, joint_product
from batchkv_worker.kv.backends.gpu.backend import GpuBackend
from batchkv_worker.kv.backends.gpu.turned_weights import TurnedLinear, TurnWeights
from batchkv_worker.kv.backends.measurements import FOLDER, Measurements
from batchkv_worker.kv.backends.rebind import install, restore
from batchkv_worker.prefix.shared.identity import weights_digest
from worker.kv.crowd import Crowd, model_of, random_prompt
from worker.kv.reference import x86

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
        self.other_dtype_too = nn.Linear(SIZE, 32, bias=False)
        for module in (self.other_dtype, self.other_dtype_too):
            module.set_dtype(mx.bfloat16)  # alike, but not like their input
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
        others = ("other_bits", "other_dtype", "other_dtype_too", "twice", "twice")
        found = {name: self[name](x) for name in (*names, *others)}
        return {**found, "other_input": self.other_input(x + 0)}

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        parts = self.parts(self.table(tokens))
        sums = sum(part.astype(mx.float32).sum(axis=-1, keepdims=True) for part in parts.values())
        return self.head(self.table(tokens) + sums)


GROUPS = [("q", "k", "v"), ("gate", "up"), ("packed_gate", "packed_up")]


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """One product wins every comparison, on every machine."""
    monkeypatch.setattr(joint_product, "is_faster", lambda *shape: True)


def fuse(model: Any) -> int:
    """Decide and install, in place of what was before; how many groups there are then."""
    restore(model)
    install(model, GpuBackend().changes(model, mx.float32, ROWS))
    return len({id(layer._group) for layer in model.modules() if hasattr(layer, "_group")})


@pytest.fixture
def without_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def group_of(toy: Toy, name: str) -> fused_linear.FusedGroup:
    group: fused_linear.FusedGroup = toy[name]._group
    return group


def test_kept_groups_are_neither_timed_nor_compared_again(
    faster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later start fuses what the first has found, unless the model has other layers by now."""

    def start(toy: Toy) -> int:
        restore(toy)
        backend = GpuBackend(measurements=Measurements.in_home(tmp_path, {}))
        install(toy, backend.changes(toy, mx.float32, ROWS))
        return len({id(module._group) for module in toy.modules() if hasattr(module, "_group")})

    assert start(Toy()) == len(GROUPS)
    with monkeypatch.context() as patch:
        patch.setattr(joint_product, "is_faster", lambda *_: pytest.fail("timed"))
        patch.setattr(fused_linear, "_of_one_input", lambda *_: pytest.fail("looked for groups"))
        patch.setattr(fused_linear, "_logits", lambda *_: pytest.fail("compared"))
        toy = Toy()
        x = mx.random.normal((ROWS, 1, SIZE))
        before = toy.parts(x)
        assert start(toy) == len(GROUPS)
        for name, part in toy.parts(x).items():
            assert mx.allclose(part, before[name], atol=1e-5).item(), name
    (file,) = (tmp_path / FOLDER).glob("*.json")
    file.write_text(file.read_text().replace('"up"', '"gone"'))
    assert start(Toy()) == len(GROUPS)
    assert '"gone"' not in file.read_text()


def test_layers_that_disagreed_once_are_not_fused_again(
    faster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outcome of the comparison is kept, too."""
    install_of = fused_linear.FuseLinears(
        (("q", "k"),), ROWS, Measurements.in_home(tmp_path, {})
    ).install
    with monkeypatch.context() as patch:
        patch.setattr(fused_linear, "are_close", lambda *_: False)
        install_of(Toy())
    toy = Toy()
    install_of(toy)
    assert type(toy.q) is nn.Linear


def test_only_layers_of_one_input_and_one_kind_are_a_group(faster: None) -> None:
    toy = Toy()
    assert fuse(toy) == len(GROUPS)
    for names in GROUPS:
        assert len({id(group_of(toy, name)) for name in names}) == 1
        assert [toy[name]._place for name in names] == list(range(len(names)))
    alone = ("other_bits", "other_dtype", "other_dtype_too", "other_input", "twice", "head")
    assert {type(toy[name]) for name in alone} == {TurnedLinear, nn.QuantizedLinear}


def test_answers_and_parameters_stay_what_they_were(faster: None) -> None:
    toy = Toy()
    few, many = mx.random.normal((ROWS, 1, SIZE)), mx.random.normal((1, ROWS + 1, SIZE))
    before = toy.parts(few), toy.parts(many)
    names = [name for name, _ in tree_flatten(toy.parameters())]
    digest = weights_digest(toy)

    assert fuse(toy) == len(GROUPS)

    for x, expected in zip((few, many), before, strict=True):
        for name, part in toy.parts(x).items():
            assert part.shape == expected[name].shape
            assert mx.allclose(part, expected[name], atol=1e-5).item(), name
    assert [name for name, _ in tree_flatten(toy.parameters())] == names
    assert weights_digest(toy) == digest


def test_one_product_serves_few_rows_alone(faster: None) -> None:
    """Which of both serves shows when one is spoilt."""
    toy = Toy()
    fuse(toy)
    for names in GROUPS:
        group = group_of(toy, names[0])
        product = group._product
        spoilt = partial(lambda multiply, x: multiply(x) * mx.nan, product.multiply)
        group._product = replace(product, multiply=spoilt)
    for shape, is_spoilt in (((ROWS, 1, SIZE), True), ((1, ROWS + 1, SIZE), False)):
        parts = toy.parts(mx.ones(shape))
        for name in sum(GROUPS, ()):
            assert mx.isnan(parts[name]).all().item() == is_spoilt
            assert mx.isnan(parts[name]).any().item() == is_spoilt


def test_outputs_of_another_input_are_not_handed_out_whole(faster: None) -> None:
    """Where a later layer of the group has an input of its own."""
    toy = Toy()
    fuse(toy)
    group = group_of(toy, GROUPS[0][0])
    group.keeps_whole = True
    x, y = mx.random.normal((2, 1, SIZE)), mx.random.normal((2, 1, SIZE))
    for inputs, is_whole in (((x, x), True), ((x, y), False)):
        for name, one in zip(GROUPS[0], inputs, strict=False):
            toy[name](one)
        assert (group.take_whole() is not None) == is_whole
        assert group.take_whole() is None


def test_who_is_asked_something_else_multiplies_itself(faster: None) -> None:
    toy = Toy()
    x, y = mx.random.normal((2, 1, SIZE)), mx.random.normal((2, 1, SIZE))
    plain = {(name, n): toy[name](z) for name in GROUPS[0] for n, z in enumerate((x, y))}
    fuse(toy)
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
    fuse(toy)
    group = group_of(toy, "q")
    x = mx.random.normal((2, 1, SIZE))
    for name in GROUPS[0][:-1]:
        toy[name](x)
    assert group._input is x
    toy.v(x)
    assert group._input is None
    assert not group._parts
    toy.q(x)
    toy.q(mx.zeros((ROWS + 1, 1, SIZE)))  # more rows: nobody else will be asked for these
    assert group._input is None


def test_weights_stand_once(faster: None, without_collection: None) -> None:
    """Whatever read them on the way is gone, and not only when Python gets round to it."""
    toy = Toy()
    mx.eval(toy.parameters())
    mx.clear_cache()
    before = mx.get_active_memory()
    fuse(toy)
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
        assert fuse(toy) == len(GROUPS)
        assert all(mx.allclose(toy.parts(x)[name], plain[name], atol=1e-5) for name in plain)
    restore(toy)
    assert not hasattr(toy.q, "_group")
    assert fuse(toy) == len(GROUPS)
    monkeypatch.setattr(joint_product, "is_faster", lambda *shape: False)
    assert fuse(toy) == 0
    assert {type(module) for module in toy.modules()} == {
        *(Toy, nn.Embedding, TurnedLinear, nn.QuantizedLinear),
    }


@pytest.mark.parametrize("wrong", ["queries", "keys", "gate"])
def test_products_that_answer_otherwise_are_not_kept(
    wrong: str, faster: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever part it is: what queries find shows from the second token on."""
    place = {"queries": 0, "keys": 1, "gate": 0}[wrong]
    right = joint_product.product_of

    def product_of(group: Any, whole: Any) -> joint_product.Product:
        product = right(group, whole)
        is_wrong = (len(group) == 3) == (wrong != "gate")

        def multiply(x: mx.array) -> mx.array:
            parts = enumerate(product(x))
            turned = [part[..., ::-1] if is_wrong and n == place else part for n, part in parts]
            return mx.concatenate(turned, axis=-1)

        return replace(product, multiply=multiply)

    model = model_of("llama")
    assert fuse(model) == 2 * len(model.layers)
    monkeypatch.setattr(joint_product, "product_of", product_of)
    with caplog.at_level(logging.WARNING, "batchkv.engine"):
        assert fuse(model) == 0
    assert "other answers" in caplog.text
    assert fused_linear.FusedLinear not in {type(module) for module in model.modules()}


@pytest.mark.parametrize("where", ["is_faster", "whole_of", "product_of"])
def test_a_device_that_refuses_multiplies_as_before(
    where: str, faster: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("[malloc] Unable to allocate")

    toy = Toy()
    x = mx.random.normal((2, 1, SIZE))
    plain = toy.parts(x)
    monkeypatch.setattr(joint_product, where, refuse)
    with caplog.at_level(logging.WARNING, "batchkv.engine"):
        assert fuse(toy) == 0
    assert "Unable to allocate" in caplog.text
    assert all(mx.array_equal(toy.parts(x)[name], plain[name]) for name in plain)


def test_only_gpus_fuse(faster: None) -> None:
    """On a CPU each layer multiplies for itself: a launch costs next to nothing."""
    toy = Toy()
    for backend in (x86(), GenericBackend()):
        install(toy, backend.changes(toy, mx.float32, ROWS))
        assert type(toy.q) is nn.Linear


def like_of(module: Any, dtype: mx.Dtype) -> joint_product.LayerSignature:
    module.set_dtype(dtype)
    return joint_product.signature_of(module, mx.zeros((1, 64), dtype))


KINDS = {
    "float": lambda: like_of(nn.Linear(64, 32, bias=False), mx.float32),
    "half": lambda: like_of(nn.Linear(64, 32), mx.bfloat16),
    "affine": lambda: like_of(nn.QuantizedLinear(64, 32, bits=4), mx.float32),
    "mxfp4": lambda: like_of(nn.QuantizedLinear(64, 32, False, 32, 4, mode="mxfp4"), mx.bfloat16),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_faster_one_wins_if_it_is_right(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is timed is played, first the layers apart, then at once; what they answer is real."""
    like = KINDS[kind]()

    products, asked = joint_product.product_of, []

    def noting(*how: Any) -> joint_product.Product:
        product = products(*how)
        multiply = product.multiply
        return replace(product, multiply=lambda x: (asked.append("at once"), multiply(x))[1])

    def verdict(once: float | None = None, won: float | None = None) -> bool:
        def play_least_times(ways: list[Any], repeats: int) -> list[float | None]:
            asked.append("once")
            return [once]

        def play_gain(plain: Callable[[], Any], other: Callable[[], Any], times: int) -> float:
            asked.clear()
            mx.eval(plain())
            assert times > 1 and won is not None and not asked
            mx.eval(other())
            assert asked == ["at once"]
            return won

        asked.clear()
        monkeypatch.setattr(joint_product, "product_of", noting)
        monkeypatch.setattr(joint_product, "least_times", play_least_times)
        monkeypatch.setattr(joint_product, "gain", play_gain)
        joint_product.is_faster.cache_clear()
        return joint_product.is_faster(like, (64, 32), ROWS)

    assert verdict(1.0, 1.2)
    assert not verdict(1.0, 1.05)
    assert not verdict(None)
    assert not verdict(2 * joint_product._LONGEST)
    assert 2560 * 2 * 9728 <= joint_product.MAX_WEIGHTS < 4096 * 2 * 12288  # of 4B, and of 8B
    with monkeypatch.context() as less:
        less.setattr(joint_product, "MAX_WEIGHTS", 64 * 96 - 1)
        assert not verdict(1.0, 1.2)
        assert not asked  # not even timed
    right = products

    def wrong(*how: Any) -> joint_product.Product:
        product = right(*how)
        grown = mx.concatenate([mx.ones(64), 2 * mx.ones(32)])
        return replace(product, multiply=lambda x: product.multiply(x) * grown.astype(x.dtype))

    products = wrong
    assert not verdict(1.0, 1.2)
    joint_product.is_faster.cache_clear()


def test_layers_that_hold_other_dtypes_are_not_alike() -> None:
    x = mx.zeros((1, 64))
    layers = [nn.QuantizedLinear(64, 32, bias=False, bits=4) for _ in range(2)]
    assert joint_product.signature_of(layers[0], x) == joint_product.signature_of(layers[1], x)
    layers[1].scales = layers[1].scales.astype(mx.bfloat16)
    assert joint_product.signature_of(layers[0], x) != joint_product.signature_of(layers[1], x)


@pytest.mark.few(3)
@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma3_text", "qwen3_next"])
def test_whole_engines_give_the_same_tokens_both_ways(
    family: str, is_quantized: bool, faster: None
) -> None:
    prompts = {f"row {n}": random_prompt(n, 30 + 37 * n) for n in range(5)}
    model = model_of(family)
    if is_quantized:
        model = type(model)(model.args)
        nn.quantize(model, group_size=32, bits=8)
    found, kinds = [], []
    # MLX compiles a graph on a CPU for seconds, so one family shows that both go together.
    replays = family == "llama" and not is_quantized
    for backend in (GpuBackend(replays_steps=replays), GenericBackend()):
        crowd: Any = Crowd(model, path="folded", backend=backend)
        found.append(crowd.answers(prompts))
        kinds.append({type(module) for module in crowd.model.modules()})
    assert found[0] == found[1]
    fused = fused_linear.FusedQuantizedLinear if is_quantized else fused_linear.FusedLinear
    assert fused in kinds[0]
    assert fused not in kinds[1]


def test_groups_are_refitted_to_an_adapter(
    faster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A LoRA layer's inner layer takes its place in the group; a group with DoRA is left out."""
    toy, backend = Toy(), GpuBackend(measurements=Measurements.in_home(tmp_path, {}))
    install(toy, backend.changes(toy, mx.float32, ROWS))
    restore(toy)
    monkeypatch.setattr(fused_linear, "_of_one_input", lambda *_: pytest.fail("looked for groups"))
    plain = {name: toy[name] for name in ("q", "v", "gate", "packed_up")}
    for name, layer in plain.items():
        kind = DoRALinear if name == "gate" else LoRALinear
        toy[name] = kind.from_base(layer, r=4, scale=2.0)
        toy[name].lora_b = mx.random.normal(toy[name].lora_b.shape)
    toy.eval()
    x = mx.random.normal((ROWS, 1, SIZE))
    before = toy.parts(x)
    change, turned = backend.changes(toy, mx.float32, ROWS)
    assert isinstance(change, fused_linear.FuseLinears) and turned == TurnWeights()
    assert change.groups == (("q.linear", "k", "v.linear"), ("packed_gate", "packed_up.linear"))
    install(toy, [change, turned])
    assert toy.q.linear._group is toy.k._group is toy.v.linear._group
    for name, part in toy.parts(x).items():
        assert mx.allclose(part, before[name], atol=1e-5).item(), name
    restore(toy)
    for name, layer in plain.items():
        toy[name] = layer
    assert fused_linear.choose(toy, ROWS, backend.measurements) == fused_linear.FuseLinears(
        (*GROUPS,), ROWS, backend.measurements
    )
