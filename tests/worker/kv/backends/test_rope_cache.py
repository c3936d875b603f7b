"""Angles that are kept for a step: the same rotation as MLX's, and never another step's."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from batchkv_worker.kv.backends.cpu import rope_cache
from batchkv_worker.kv.backends.cpu.rope_cache import CachedRoPE, RopeTables, Rotary
from batchkv_worker.kv.backends.rebind import install
from support import tiny_models
from worker.kv.crowd import Crowd, random_prompt
from worker.kv.reference import x86

ROTARIES = [
    Rotary(64, 64, False, 10000.0, 1.0),
    Rotary(64, 64, True, 10000.0, 1.0),
    Rotary(64, 16, False, 500000.0, 0.125),
    Rotary(48, 32, True, 1e6, 2.0),
]
IDS = ["halves", "pairs", "part of a head", "part, pairs"]


@pytest.mark.parametrize("rotary", ROTARIES, ids=IDS)
@pytest.mark.parametrize("tokens", [1, 37])
@pytest.mark.parametrize("offset", [0, 4000, mx.array([5, 0, 900], mx.int32)], ids=str)
def test_a_rotation_is_mlxs(rotary: Rotary, tokens: int, offset: Any) -> None:
    mx.random.seed(tokens)
    x = mx.random.normal((3, 2, tokens, rotary.size))
    plain = nn.RoPE(rotary.dims, rotary.traditional, rotary.base, rotary.scale)
    found = rope_cache.rotated(x, rotary, rope_cache.table(rotary, tokens, offset))
    assert found.shape == x.shape
    assert mx.allclose(found, plain(x, offset), atol=2e-6).item()
    if not isinstance(offset, int):
        assert not mx.allclose(found, plain(x, 3), atol=1e-2).item()


def test_a_table_is_made_once_a_step() -> None:
    kept, rotary = RopeTables(), ROTARIES[0]
    offsets = mx.array([7, 8])
    kept.begin(offsets)
    first = kept.of(rotary, 1, offsets)
    assert first is not None
    assert kept.of(rotary, 1, offsets) is first
    assert kept.of(ROTARIES[1], 1, offsets) is not first
    chunk = kept.of(rotary, 16, 256)
    assert kept.of(rotary, 16, 256) is chunk
    assert kept.of(ROTARIES[2], 16, 256) is not chunk
    later = mx.array([8, 9])
    kept.begin(later)
    again = kept.of(rotary, 1, later)
    assert again is not None
    assert not mx.array_equal(again[0], first[0]).item()
    assert kept.of(rotary, 16, 256) is chunk  # the step has come between two layers' chunks


def test_arrays_that_are_not_the_steps_are_never_known() -> None:
    """mlx-lm's caches change theirs in place."""
    kept = RopeTables()
    offsets = mx.array([7, 8])
    assert kept.of(ROTARIES[0], 1, offsets) is None
    kept.begin(mx.array([7, 8]))
    assert kept.of(ROTARIES[0], 1, offsets) is None


def test_one_chunk_is_kept() -> None:
    """Its tables are as long as it is: those of others would be memory that nobody reckons with."""
    kept, rotary = RopeTables(), ROTARIES[0]
    for tokens, offset in ((16, 256), (16, 512), (15, 512), (15, 0)):
        chunk = kept.of(rotary, tokens, offset)
        assert kept.of(rotary, tokens, offset) is chunk
        assert chunk is not None and chunk[0].shape[-2] == tokens
        assert kept._of_chunk == ((tokens, offset), {rotary: chunk})


def test_a_layer_takes_what_is_known_and_else_computes() -> None:
    layer = CachedRoPE(64)
    layer._tables = kept = RopeTables()
    x = mx.random.normal((2, 3, 1, 64))
    offsets = mx.array([7, 800])
    wanted = nn.RoPE(64)(x, offsets)
    assert mx.array_equal(layer(x, offsets), wanted).item()  # not the step's
    assert not kept._of_step[1]
    kept.begin(offsets)
    assert mx.allclose(layer(x, offsets), wanted, atol=2e-6).item()
    assert len(kept._of_step[1]) == 1
    for other in (x.astype(mx.bfloat16), x[0]):
        offset = offsets if other.ndim == 4 else 7
        assert mx.array_equal(layer(other, offset), nn.RoPE(64)(other, offset)).item()
    assert (len(kept._of_step[1]), len(kept._of_chunk[1])) == (1, 0)


def test_layers_are_replaced_only_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is measured, or named; undone, the layers are as mlx-lm made them."""
    model = tiny_models.build("llama")

    def kinds() -> set[type]:
        return {type(module) for module in model.modules()} & {nn.RoPE, CachedRoPE}

    for is_faster in (True, False):
        monkeypatch.setattr(rope_cache, "is_faster", lambda is_faster=is_faster: is_faster)
        for backend in (x86(uses_rope_cache=is_faster), x86(uses_rope_cache=None)):
            changes = backend.changes(model, mx.float32, 2)
            assert kinds() == {nn.RoPE}  # so far it was only decided
            undo = install(model, changes)
            assert kinds() == {CachedRoPE if is_faster else nn.RoPE}
            undo()
            assert kinds() == {nn.RoPE}
        assert not x86(uses_rope_cache=None).changes(model, mx.bfloat16, 2)


def test_the_measurement_ends_with_a_verdict() -> None:
    assert rope_cache.is_faster() in (True, False)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next", "gpt_oss"])
def test_whole_engines_give_the_same_tokens_both_ways(family: str) -> None:
    prompts = {f"row {n}": random_prompt(n, 30 + 37 * n) for n in range(5)}
    found = []
    for wins in (True, False):
        backend = x86(uses_rope_cache=wins)
        crowd = Crowd(family, path="folded", chunk_tokens=64, backend=backend)
        for name, prompt in prompts.items():
            crowd.add(name, prompt)
        crowd.step(3)
        assert bool(backend.tables._of_step[1]) is wins
        assert bool(backend.tables._of_chunk[1]) is wins
        crowd.drain()
        found.append({name: crowd.tokens(name) for name in prompts})
    assert found[0] == found[1]
