"""Linear layers whose weights are turned once give the same numbers with fewer nodes."""

from __future__ import annotations

import io

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.lora import LoRALinear

from batchkv_worker.kv.backends.gpu import fused_linear
from batchkv_worker.kv.backends.gpu.backend import GpuBackend
from batchkv_worker.kv.backends.gpu.turned_weights import TurnedLinear, TurnWeights


class Model(nn.Module):
    """A layer with a bias, one without, and one in an adapter's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16, bias=False)
        self.adapted = LoRALinear.from_base(nn.Linear(16, 8))
        self.packed = nn.QuantizedLinear(64, 16)

    def __call__(self, x: mx.array) -> mx.array:
        return self.adapted(self.second(nn.silu(self.first(x))))


@pytest.fixture
def model() -> Model:
    mx.random.seed(3)
    found = Model()
    mx.eval(found.parameters())
    return found


def turns(array: mx.array) -> int:
    text = io.StringIO()
    mx.export_to_dot(text, array)
    return text.getvalue().count('"Transpose"')


@pytest.mark.parametrize("shape", [(1, 1, 16), (5, 1, 16), (2, 7, 16), (3, 16)])
def test_results_are_the_same_and_no_weight_is_turned_again(
    shape: tuple[int, ...], model: Model
) -> None:
    x = mx.random.normal(shape)
    wanted = model(x)
    assert turns(wanted) == 3
    mx.eval(wanted)
    undo = TurnWeights().install(model)
    found = model(x)
    assert turns(found) == 0
    assert mx.array_equal(found, wanted)
    traced = mx.compile(model)
    assert mx.array_equal(traced(x), wanted)
    undo()
    assert mx.array_equal(model(x), wanted)


def test_only_plain_layers_change_and_change_back(model: Model) -> None:
    before = tree_flatten(model.parameters())
    kinds = {name: type(module) for name, module in model.named_modules()}
    undo = TurnWeights().install(model)
    changed = {name for name, module in model.named_modules() if type(module) is TurnedLinear}
    assert changed == {"first", "second", "adapted.linear"}
    after = tree_flatten(model.parameters())
    assert [name for name, _ in after] == [name for name, _ in before]
    assert all(one is other for (_, one), (_, other) in zip(before, after, strict=True))
    undo()
    assert {name: type(module) for name, module in model.named_modules()} == kinds
    assert not any("_both" in module for module in model.modules())


def test_a_new_weight_is_used(model: Model) -> None:
    """As where weights are loaded again, or an adapter is merged."""
    x, weight = mx.random.normal((2, 1, 16)), mx.random.normal((32, 16))
    TurnWeights().install(model)
    old = model(x)
    model.first.weight = weight
    found, other = model(x), Model()
    other.update(model.parameters())
    assert not mx.array_equal(found, old)
    assert mx.array_equal(found, other(x))
    assert model.first._both[0] is weight


def test_gpus_turn_what_is_not_fused(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_linear, "choose", lambda *_: None)
    changes = GpuBackend().changes(model, mx.float32, 4)
    assert [type(change) for change in changes][-1] is TurnWeights
