"""Weights in blocks for steps of few rows: the same products, and nothing else of the model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from batchkv_worker.kv.backends import blas
from batchkv_worker.kv.backends.cpu import blocked_linear
from batchkv_worker.kv.backends.rebind import install, restore
from batchkv_worker.prefix.shared.identity import weights_digest
from worker.kv.crowd import Crowd, random_prompt
from worker.kv.reference import x86

ROWS = 6


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks win every comparison, on every machine."""
    monkeypatch.setattr(blocked_linear, "is_faster", lambda *shape: True)
    monkeypatch.setattr(blas, "is_openblas", lambda: True)


def put(model: Any, dtype: mx.Dtype, rows: int) -> int:
    """Decide and install, in place of what was before; bytes of the blocks."""
    restore(model)
    install(
        model,
        x86(uses_exp2=False, uses_rope_cache=False, uses_blocked_linear=None).changes(
            model, dtype, rows
        ),
    )
    kinds = tuple(blocked_linear._BLOCKED.values())
    return sum(layer._blocks.nbytes for layer in model.modules() if type(layer) in kinds)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(48, 96, bias=False)
        self.biased = nn.Linear(96, 64)
        self.odd = nn.Linear(64, 30)  # no block of 16 columns fits
        self.table = nn.Embedding(32, 64)
        self.quantized = nn.QuantizedLinear(64, 64)
        self.args = SimpleNamespace(tie_word_embeddings=True)


@pytest.mark.parametrize(
    ("outputs", "inputs", "rows", "columns"),
    [
        (256, 256, 32, 64),  # 122 would be small; 64 is the most that goes into 256
        (96, 64, 32, 96),
        (4096, 512, 32, 32),
        (48, 1953, 32, 16),
        (48, 1954, 32, None),
        (30, 64, 32, None),
        (8, 8, 1, None),
    ],
)
def test_blocks_are_as_wide_as_a_small_product(
    outputs: int, inputs: int, rows: int, columns: int | None
) -> None:
    assert blocked_linear.columns_of(outputs, inputs, rows) == columns
    if columns is not None:
        assert columns * inputs * rows <= blocked_linear.MAX_SMALL
        assert outputs % columns == 0


@pytest.mark.parametrize("shape", [(1, 48), (5, 1, 48), (2, 3, 48), (0, 1, 48)])
def test_a_product_in_blocks_is_the_whole(shape: tuple[int, ...]) -> None:
    mx.random.seed(1)
    x, weight = mx.random.normal(shape), mx.random.normal((96, 48))
    found = blocked_linear.product(x, blocked_linear.in_blocks(weight, 32))
    assert found.shape == (*shape[:-1], 96)
    assert mx.allclose(found, x @ weight.T, atol=1e-5).item()


def test_only_what_is_called_with_few_rows_changes(
    faster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mx.random.seed(2)
    layers = Layers()
    inputs = {"plain": 48, "biased": 96, "odd": 64, "quantized": 64}
    few = {name: mx.random.normal((ROWS, 1, size)) for name, size in inputs.items()}
    many = {name: mx.random.normal((1, ROWS + 1, size)) for name, size in inputs.items()}
    heads = mx.random.normal((ROWS, 64))
    before = {name: (layers[name](few[name]), layers[name](many[name])) for name in inputs}
    head = layers.table.as_linear(heads)
    parameters = tree_flatten(layers.parameters())
    digest = weights_digest(layers)

    num_bytes = put(layers, mx.float32, ROWS)

    assert num_bytes == 4 * (48 * 96 + 96 * 64 + 32 * 64)
    assert [type(layers[name]) for name in inputs] == [
        *(blocked_linear.BlockedLinear, blocked_linear.BlockedLinear),
        *(nn.Linear, nn.QuantizedLinear),
    ]
    for name in inputs:
        assert mx.allclose(layers[name](few[name]), before[name][0], atol=1e-5).item()
        assert mx.array_equal(layers[name](many[name]), before[name][1]).item()
    assert mx.allclose(layers.table.as_linear(heads), head, atol=1e-5).item()
    assert layers.table(mx.array([3])).shape == (1, 64)
    assert [name for name, _ in tree_flatten(layers.parameters())] == [n for n, _ in parameters]
    assert weights_digest(layers) == digest
    assert put(layers, mx.float32, ROWS) == num_bytes  # a second engine of the model
    monkeypatch.setattr(blocked_linear, "is_faster", lambda *shape: False)
    assert put(layers, mx.float32, ROWS) == 0
    assert type(layers.plain) is nn.Linear
    assert "_blocks" not in layers.plain


def test_blocks_are_read_for_few_rows_alone(faster: None) -> None:
    """Which of both serves shows when one is spoilt."""
    layers = Layers()
    put(layers, mx.float32, ROWS)
    for name, size in (("plain", 48), ("biased", 96)):
        layers[name]._blocks = mx.full(layers[name]._blocks.shape, mx.nan)
        assert mx.isnan(layers[name](mx.ones((ROWS, 1, size)))).all().item()
        assert not mx.isnan(layers[name](mx.ones((ROWS + 1, 1, size)))).any().item()
    layers.table._blocks = mx.full(layers.table._blocks.shape, mx.nan)
    assert mx.isnan(layers.table.as_linear(mx.ones((ROWS, 64)))).all().item()
    assert not mx.isnan(layers.table.as_linear(mx.ones((1, ROWS + 1, 64)))).any().item()


@pytest.mark.parametrize("why", ["dtype", "slower", "another BLAS", "half weights"])
def test_a_model_that_gains_nothing_is_left_alone(
    why: str, faster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = Layers()
    if why == "slower":
        monkeypatch.setattr(blocked_linear, "is_faster", lambda *shape: False)
    if why == "another BLAS":
        monkeypatch.setattr(blas, "is_openblas", lambda: False)
    if why == "half weights":
        layers.set_dtype(mx.bfloat16)
    dtype = mx.bfloat16 if why == "dtype" else mx.float32
    assert put(layers, dtype, ROWS) == 0
    assert type(layers.plain) is nn.Linear
    assert type(layers.table) is nn.Embedding


def test_an_embedding_that_is_no_head_has_no_blocks(faster: None) -> None:
    layers = Layers()
    layers.args.tie_word_embeddings = False
    assert put(layers, mx.float32, ROWS) == 4 * (48 * 96 + 96 * 64)
    assert type(layers.table) is nn.Embedding


def test_blocks_take_little_memory(faster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be more than they may take has none."""
    monkeypatch.setattr(blocked_linear, "MAX_BYTES", 4 * 48 * 96)
    layers = Layers()
    found = put(layers, mx.float32, ROWS)
    assert 0 < found <= blocked_linear.MAX_BYTES
    blocks = [
        m._blocks.nbytes for m in layers.modules() if type(m) in blocked_linear._BLOCKED.values()
    ]
    assert sum(blocks) == found


def test_the_measurement_ends_with_a_verdict_and_all_threads() -> None:
    if not blas.is_openblas():
        pytest.skip("without OpenBLAS nothing is measured")
    before = blas._loaded[0].openblas_get_num_threads()
    assert blocked_linear.is_faster(64, 64, 32, 4) in (True, False)
    assert blas._loaded[0].openblas_get_num_threads() == before
    with pytest.raises(RuntimeError, match="on the way"), blas.threads(1):
        assert blas._loaded[0].openblas_get_num_threads() == 1
        raise RuntimeError("on the way")
    assert blas._loaded[0].openblas_get_num_threads() == before
    with blas.threads(10**6):
        assert blas._loaded[0].openblas_get_num_threads() == before


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma3_text", "qwen3_next"])
def test_whole_engines_give_the_same_tokens_both_ways(
    family: str, monkeypatch: pytest.MonkeyPatch, faster: None
) -> None:
    prompts = {f"row {n}": random_prompt(n, 30 + 37 * n) for n in range(5)}
    found, kinds = [], []
    for wins in (True, False):
        monkeypatch.setattr(blocked_linear, "is_faster", lambda *shape, wins=wins: wins)
        crowd: Any = Crowd(family, path="folded", backend=x86(uses_blocked_linear=None))
        found.append(crowd.answers(prompts))
        kinds.append({type(module) for module in crowd.model.modules()})
    assert found[0] == found[1]
    assert blocked_linear.BlockedLinear in kinds[0]
    assert blocked_linear.BlockedLinear not in kinds[1]
