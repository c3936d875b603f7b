"""Prefill's attention on CUDA has few numbers of rows, for each of which MLX makes a plan."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import pytest

from batchkv_worker.engine.engine import Engine, EngineConfig
from batchkv_worker.kv.backends.cuda import backend
from batchkv_worker.kv.backends.cuda.backend import CudaBackend
from batchkv_worker.kv.backends.generic import GenericBackend
from batchkv_worker.kv.backends.pacing import UNPACED
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
