"""Models that only hand dense keys and values on get stand-ins, which attention replaces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from batchkv_worker.kv.attention.paths import attention
from batchkv_worker.kv.layers.attention_prefill import AttentionPrefill
from batchkv_worker.kv.layers.contract import Chunk
from batchkv_worker.kv.layers.kinds import AttentionKind
from worker.kv.checked_slots import CheckedSlots
from worker.kv.reference import HEADS, SIZE, attention_kind, keys_of, values_of

TOKENS = (5, 6, 7, 8, 9)
QUERY_HEADS = 2 * HEADS


def queries_of(tokens: int, rows: int = 1) -> mx.array:
    return mx.random.normal((rows, QUERY_HEADS, tokens, SIZE), key=mx.random.key(1))


def chunk_of(kind: AttentionKind) -> tuple[AttentionPrefill, Any, Any]:
    """A layer in its first chunk, and what it handed out."""
    layer = kind.prefill(16, 16)
    layer.begin(Chunk(0, len(TOKENS)))
    keys, values = layer.update_and_fetch(keys_of([TOKENS]), values_of([TOKENS]))
    return layer, keys, values


def step_of(kind: AttentionKind) -> tuple[Any, Any, Any]:
    """A layer in a step of three rows, and what it handed out."""
    crowd = CheckedSlots([kind])
    crowd.join(4, 6, 2)
    crowd.slots.begin_step()
    (layer,) = crowd.slots.layers
    fed = [[1], [2], [3]]
    keys, values = layer.update_and_fetch(keys_of(fed), values_of(fed))  # type: ignore[attr-defined]
    return layer, keys, values


@pytest.mark.parametrize("scheme", ["float", "affine8", "turbo3"])
def test_a_stand_in_has_the_shape_and_no_number(scheme: str) -> None:
    """A model that reads it has no number among its results, so the check at start sees it."""
    kind = attention_kind(scheme)
    for begun in (chunk_of, step_of):
        _, *wanted = begun(kind)
        layer, *found = begun(replace(kind, is_read=False))
        assert [one.shape for one in found] == [one.shape for one in wanted]
        assert all(one.dtype == mx.float32 and mx.isnan(one).all() for one in found)
        # Layers without keys of their own hand on the same two, by which attention knows them.
        assert all(one is other for one, other in zip(layer.keys_and_values(), found, strict=True))


@pytest.mark.parametrize("scheme", ["float", "affine8", "turbo3"])
@pytest.mark.parametrize("is_own_mask", [True, False])
def test_attention_is_the_same_with_stand_ins(scheme: str, is_own_mask: bool) -> None:
    """Also with a mask that is not the cache's, where mlx-lm's function reads the arrays."""
    kind = attention_kind(scheme)
    for begun, rows in ((chunk_of, 1), (step_of, 3)):
        results = []
        for is_read in (True, False):
            layer, keys, values = begun(replace(kind, is_read=is_read))
            width = layer.span.num_rows if rows > 1 else len(TOKENS)
            mask = layer.make_mask(1) if rows > 1 else "causal"
            if not is_own_mask:
                mask = mx.ones((1, 1, 1 if rows > 1 else width, keys.shape[-2]), mx.bool_)
            queries = queries_of(1 if rows > 1 else width, rows)
            results.append(attention(queries, keys, values, layer, 0.1, mask))
        assert mx.array_equal(*results)
        assert not mx.isnan(results[1]).any()


def test_a_stand_in_is_made_once_for_a_shape() -> None:
    """The next step of the same shape gets the same arrays."""
    layer, keys, _ = step_of(replace(attention_kind("affine8"), is_read=False))
    again, _ = layer.update_and_fetch(keys_of([[1]] * 3), values_of([[1]] * 3))
    assert again is keys
