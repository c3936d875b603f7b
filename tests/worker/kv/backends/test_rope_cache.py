"""Angles that are kept for a step: the same rotation as MLX's, and never another step's."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from batchkv_worker.kv.backends.cpu import rope_cache as angles
from batchkv_worker.kv.backends.cpu.rope_cache import Angles, KeptRoPE, Turn
from worker.kv.crowd import Crowd, random_prompt

TURNS = [
    Turn(64, 64, False, 10000.0, 1.0),
    Turn(64, 64, True, 10000.0, 1.0),
    Turn(64, 16, False, 500000.0, 0.125),
    Turn(48, 32, True, 1e6, 2.0),
]
IDS = ["halves", "pairs", "part of a head", "part, pairs"]


def choose(monkeypatch: pytest.MonkeyPatch, *, wins: bool) -> None:
    monkeypatch.setattr(angles, "_is_faster", lambda: wins)


@pytest.mark.parametrize("turn", TURNS, ids=IDS)
@pytest.mark.parametrize("tokens", [1, 37])
@pytest.mark.parametrize("offset", [0, 4000, mx.array([5, 0, 900], mx.int32)], ids=str)
def test_a_turn_is_mlxs(turn: Turn, tokens: int, offset: Any) -> None:
    mx.random.seed(tokens)
    x = mx.random.normal((3, 2, tokens, turn.size))
    plain = nn.RoPE(turn.dims, turn.traditional, turn.base, turn.scale)
    found = angles.turned(x, turn, angles.table(turn, tokens, offset))
    assert found.shape == x.shape
    assert mx.allclose(found, plain(x, offset), atol=2e-6).item()
    if not isinstance(offset, int):
        assert not mx.allclose(found, plain(x, 3), atol=1e-2).item()


def test_a_table_is_made_once_a_step() -> None:
    kept, turn = Angles(), TURNS[0]
    offsets = mx.array([7, 8])
    kept.begin(offsets)
    first = kept.of(turn, 1, offsets)
    assert first is not None
    assert kept.of(turn, 1, offsets) is first
    assert kept.of(TURNS[1], 1, offsets) is not first
    chunk = kept.of(turn, 16, 256)
    assert kept.of(turn, 16, 256) is chunk
    assert kept.of(TURNS[2], 16, 256) is not chunk
    later = mx.array([8, 9])
    kept.begin(later)
    again = kept.of(turn, 1, later)
    assert again is not None
    assert not mx.array_equal(again[0], first[0]).item()
    assert kept.of(turn, 16, 256) is chunk  # the step has come between two layers' chunks


def test_arrays_that_are_not_the_steps_are_never_known() -> None:
    """mlx-lm's caches change theirs in place."""
    kept = Angles()
    offsets = mx.array([7, 8])
    assert kept.of(TURNS[0], 1, offsets) is None
    kept.begin(mx.array([7, 8]))
    assert kept.of(TURNS[0], 1, offsets) is None


def test_one_chunk_is_kept() -> None:
    """Its tables are as long as it is: those of others would be memory that nobody reckons with."""
    kept, turn = Angles(), TURNS[0]
    for tokens, offset in ((16, 256), (16, 512), (15, 512), (15, 0)):
        chunk = kept.of(turn, tokens, offset)
        assert kept.of(turn, tokens, offset) is chunk
        assert chunk is not None and chunk[0].shape[-2] == tokens
        assert kept._of_chunk == ((tokens, offset), {turn: chunk})


def test_a_layer_takes_what_is_known_and_else_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = KeptRoPE(64)
    x = mx.random.normal((2, 3, 1, 64))
    offsets = mx.array([7, 800])
    wanted = nn.RoPE(64)(x, offsets)
    monkeypatch.setattr(angles, "ANGLES", kept := Angles())
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
    model = Crowd("llama").model

    def kinds() -> set[type]:
        return {type(module) for module in model.modules()} & {nn.RoPE, KeptRoPE}

    choose(monkeypatch, wins=True)
    assert angles.install(model, mx.float32)
    assert kinds() == {KeptRoPE}
    assert not angles.install(model, mx.bfloat16)
    assert kinds() == {nn.RoPE}
    choose(monkeypatch, wins=False)
    assert not angles.install(model, mx.float32)
    assert kinds() == {nn.RoPE}


def test_the_measurement_ends_with_a_verdict() -> None:
    assert angles._is_faster() in (True, False)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next", "gpt_oss"])
def test_whole_engines_give_the_same_tokens_both_ways(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = {f"row {n}": random_prompt(n, 30 + 37 * n) for n in range(5)}
    found = []
    for wins in (True, False):
        choose(monkeypatch, wins=wins)
        crowd = Crowd(family, path="folded", chunk_tokens=64)
        monkeypatch.setattr(angles.ANGLES, "_of_chunk", ((0, 0), {}))
        for name, prompt in prompts.items():
            crowd.add(name, prompt)
        crowd.step(3)
        assert bool(angles.ANGLES._of_step[1]) is wins
        assert bool(angles.ANGLES._of_chunk[1]) is wins
        crowd.drain()
        found.append({name: crowd.tokens(name) for name in prompts})
    assert found[0] == found[1]
