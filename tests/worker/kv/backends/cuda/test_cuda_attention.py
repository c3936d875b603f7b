"""Prefill's attention on CUDA has few numbers of rows, for each of which MLX makes a plan."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from batchkv_worker.engine.engine import Engine, EngineConfig
from batchkv_worker.kv.attention.paths import LayerAttention
from batchkv_worker.kv.backends.cuda import backend
from batchkv_worker.kv.backends.cuda.backend import CudaBackend
from batchkv_worker.kv.backends.generic import GenericBackend
from batchkv_worker.kv.backends.pacing import UNPACED
from batchkv_worker.kv.layers.attention_prefill import AttentionPrefill
from batchkv_worker.kv.schemes.packing import LayerShape, fit_model
from batchkv_worker.kv.schemes.spec import SchemeSpec
from parity.harness import Row, drain, submit
from support import tiny_models


def attention_of(rows: int, tokens: int, mask: Any, history: int = 5) -> tuple[mx.array, mx.array]:
    """Of CUDA's backend, and of one that changes nothing."""
    columns = tokens + history
    queries, keys, values = (
        mx.random.normal((rows, heads, length, 16))
        for heads, length in ((4, tokens), (2, columns), (2, columns))
    )
    found, plain = (
        one.attention(queries, keys, values, 0.25, mask, None)
        for one in (CudaBackend(), GenericBackend())
    )
    return found, plain


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 7])
@pytest.mark.parametrize("mask", [None, "causal"])
def test_rows_of_zeros_change_nothing(
    rows: int, mask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are computed in powers of two, and the result has those that were asked for."""
    seen: list[int] = []
    real = mx.fast.scaled_dot_product_attention

    def watched(queries: mx.array, *rest: Any, **named: Any) -> mx.array:
        seen.append(queries.shape[0])
        return real(queries, *rest, **named)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", watched)
    found, plain = attention_of(rows, 6, mask)
    assert mx.allclose(found, plain, atol=1e-6) and found.shape == plain.shape
    assert seen == [8, rows]
    monkeypatch.setattr(backend, "FEW_TOKENS", 40)
    found, plain = attention_of(rows, 6, mask)
    assert mx.allclose(found, plain, atol=1e-6) and found.shape == plain.shape
    assert seen[2:] == [{1: 4, 3: 4, 4: 4, 5: 8, 7: 8}[rows], rows]


@pytest.mark.parametrize(
    ("tokens", "history", "wanted"),
    [
        *((100, 0, 128), (100, 1, 128), (40, 0, 128), (40, 1, 64), (128, 0, 128)),
        *((64, 1, 128), (64, 64, 64), (40, 16, 64), (50, 80, 128), (16, 112, 64)),
    ],
)
@pytest.mark.parametrize("rows", [3, 4])
def test_tokens_of_zeros_change_nothing(
    rows: int, tokens: int, history: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to one of few lengths; with history up to a multiple of columns and of queries.

    Under a causal mask alone.
    """
    seen: list[tuple[int, int]] = []
    columns: list[int] = []
    real = mx.fast.scaled_dot_product_attention

    def watched(queries: mx.array, keys: mx.array, *rest: Any, **named: Any) -> mx.array:
        seen.append((queries.shape[0], queries.shape[2]))
        columns.append(keys.shape[2])
        return real(queries, keys, *rest, **named)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(backend, "FEW_TOKENS", 40)
    found, plain = attention_of(rows, tokens, "causal", history)
    assert mx.allclose(found, plain, atol=1e-6) and found.shape == plain.shape
    assert seen == [(4, wanted), (rows, tokens)]
    assert columns[0] % 64 == 0 and columns[0] - wanted == history - history % 64
    found, plain = attention_of(rows, tokens, None, history)  # all keys are seen
    assert mx.allclose(found, plain, atol=1e-6) and seen[2] == (4, tokens)


def test_lengths_are_rounded_to_few() -> None:
    wanted = {64: 128, 128: 128, 129: 256, 500: 512, 513: 768, 1024: 1024, 1025: 1536, 2048: 2048}
    assert {length: backend.rounded_length(length) for length in wanted} == wanted


def test_large_chunks_decode_and_masks_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their copies would cost more than a plan; and decode has kernels without plans."""
    monkeypatch.setattr(mx, "pad", None)  # nothing may call it
    attention_of(3, 1, None)
    attention_of(3, 6, mx.ones((6, 11), mx.bool_))
    monkeypatch.setattr(backend, "MOST_PADDED", 4 * 2 * 11 * 16 - 1)
    attention_of(3, 6, "causal")


@dataclass(frozen=True, eq=False)
class OnCpu(CudaBackend):
    """CUDA's shapes, without what needs CUDA."""

    launches_beside: bool = False

    def plans_attention(self, *_: Any) -> bool:
        return True

    def launch(self) -> Any:
        return None

    def record_kernels(self, *_: Any) -> None:
        return None

    def chunk_kernels(self, *_: Any) -> None:
        return None

    def draw_kernel(self) -> None:
        return None

    def changes(self, *_: Any) -> tuple[()]:
        return ()

    def unpack_weights(self, *_: Any, **__: Any) -> int:
        return 0

    def pacing(self, _: Any) -> Any:
        return UNPACED


@pytest.mark.parametrize("scheme", ["float", "affine8"])
def test_chunks_have_few_shapes_under_each_scheme(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Powers of two, and lengths of the table. The answers are those without pads."""
    rng = random.Random(4)
    prompts = [
        [rng.randrange(tiny_models.VOCABULARY) for _ in range(length)]
        for length in (9, 41, 57, 90, 130, 140, 200, 300)
    ]
    model, answers = tiny_models.build("llama"), []
    seen: set[tuple[int, int]] = set()
    real = mx.fast.scaled_dot_product_attention

    def watched(queries: mx.array, *rest: Any, **named: Any) -> mx.array:
        seen.add((queries.shape[0], queries.shape[2]))
        return real(queries, *rest, **named)

    for made in (OnCpu(), GenericBackend()):
        sizes = {"slots": 8, "chunk_tokens": 512, "memory_bytes": 2**28}
        config = EngineConfig(scheme, path="fused", group_cost=64, backend=made, **sizes)
        running = Engine(tiny_models.loaded(model), config)
        with monkeypatch.context() as patch:
            if isinstance(made, OnCpu):
                patch.setattr(mx.fast, "scaled_dot_product_attention", watched)
            rows = {str(n): Row(prompt, 6) for n, prompt in enumerate(prompts)}
            for name, row in rows.items():
                submit(running, name, row)
            answers.append({name: one.token_ids for name, one in drain(running).items()})
        running.close()
    assert answers[0] == answers[1]
    chunks = {one for one in seen if one[1] > 1}
    assert chunks and {rows for rows, _ in chunks} <= {1, 2, 4, 8}
    assert {tokens for _, tokens in chunks} <= set(backend.LENGTHS)


def test_parts_of_buffers_are_handed_over_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan is for strides, too: those of a buffer say how long the longest prompt is."""
    seen: set[tuple[Any, ...]] = set()
    real = mx.fast.scaled_dot_product_attention

    def watched(queries: mx.array, *both: mx.array, **named: Any) -> mx.array:
        mx.eval(queries, both)
        seen.add(tuple(np.array(one, copy=False).strides for one in both))
        return real(queries, *both, **named)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", watched)
    queries = mx.random.normal((8, 4, 64, 16))
    for capacity in (192, 256, 300):
        keys, values = (mx.random.normal((8, 2, capacity, 16))[..., :128, :] for _ in range(2))
        plain = GenericBackend().attention(queries, keys, values, 0.25, "causal", None)
        seen.clear()
        found = CudaBackend().attention(queries, keys, values, 0.25, "causal", None)
        assert mx.allclose(found, plain, atol=1e-6)
        assert seen == {((2 * 128 * 16 * 4, 128 * 16 * 4, 16 * 4, 4),) * 2}


def test_pads_are_counted_where_layers_are_held_back() -> None:
    """A layer that pads copies its keys and values, whatever the scheme."""
    counted: list[int] = []

    class Counting(type(UNPACED)):  # type: ignore[misc]
        def follow(self, output: mx.array, num_dense: int) -> None:
            counted.append(num_dense)

    backends = OnCpu(), GenericBackend(), LikeOld()
    wanted = 8 * 128 * 2 * (16 + 16), None, 0
    for made, count in zip(backends, wanted, strict=True):
        shape = LayerShape(2, 16, 16)
        scheme = fit_model(SchemeSpec.parse("float"), [shape])[0]
        layer = AttentionPrefill(LayerAttention(made, scheme, mx.float32), None, 100, 100)
        layer.pacing = Counting()
        keys, values = layer.update_and_fetch(*(mx.zeros((7, 2, 100, 16)) for _ in range(2)))
        assert layer.handed_out(keys, values, "causal")
        counted.clear()
        if count is None:
            assert layer.attend is None
        else:
            assert layer.attend is not None
            layer.attend(mx.zeros((7, 4, 100, 16)), 0.25, "causal", None)
            assert counted == [count]


@dataclass(frozen=True, eq=False)
class LikeOld(GenericBackend):
    """Pads nothing, and has no fused kernel."""

    has_fused_attention: bool = False
