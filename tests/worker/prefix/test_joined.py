"""Histories of rows are joined for a few layers at once, with the numbers of each layer's own."""

from __future__ import annotations

import gc

import mlx.core as mx
import numpy as np
import pytest

from batchkv_cache_store.blocks.block import Kind
from batchkv_cache_store.keys import BLOCK_TOKENS
from batchkv_worker.kv.layers.prefill_rows import PrefillRows
from batchkv_worker.kv.slots.layouts import Costs
from batchkv_worker.kv.types import Pieces
from batchkv_worker.prefix import bundle
from batchkv_worker.prefix.bundle import ALL_PIECES, PIECES_TOGETHER, Bundle, Joined
from batchkv_worker.prefix.filling import fill
from batchkv_worker.prefix.memory import PrefixCache
from batchkv_worker.sequence import Generation
from batchkv_worker.sequence import Sequence as Row
from worker.kv.reference import BACKEND, append_chunk, attention_kind, bits, x86

LAYERS = PIECES_TOGETHER + 3


def block(seed: int, *, small: int | None = None) -> Bundle:
    """Two parts of one shape and one of another for each layer; ``small``: one layer lacks keys."""
    mx.random.seed(seed)
    layers: list[Pieces | None] = []
    for layer in range(LAYERS):
        sizes = (8, 8, 2) if layer != small else (4, 8, 2)
        layers.append(tuple(mx.random.normal((1, 2, 16, size)) for size in sizes))
    return Bundle(layers)


def wanted(rows: list[list[Bundle]], layer: int) -> Pieces:
    """Layer by layer, row by row."""
    lines = []
    for blocks in rows:
        found = [one.layer(layer) for one in blocks]
        lines.append([mx.concatenate(parts, axis=-2) for parts in zip(*found, strict=True)])  # type: ignore[arg-type]
    return tuple(mx.concatenate(parts, axis=0) for parts in zip(*lines, strict=True))


@pytest.mark.parametrize("small", [None, 5])
def test_each_layer_gets_its_own_numbers(small: int | None) -> None:
    """Rows with blocks in common, with the same blocks, and with others; layers of two shapes."""
    a, b, c = (block(seed, small=small) for seed in range(3))
    for rows in ([[a, b], [a, c], [a, b]], [[a, b], [a, b]], [[c, b]], [[a], [b]]):
        for joined in (Joined(rows), Joined(rows, 1), Joined(rows, ALL_PIECES)):
            for layer in range(LAYERS):
                found = joined.layer(layer)
                for one, other in zip(found, wanted(rows, layer), strict=True):
                    assert mx.array_equal(one, other)


def test_the_pieces_of_a_layer_are_no_copies() -> None:
    """MLX copies what a number in brackets takes out: hundreds of arrays for a prefix."""
    one, other = block(1), block(2)
    mx.eval(one.arrays, other.arrays)
    pair = Joined([[one], [other]], ALL_PIECES)
    joined = [Joined([[one]], ALL_PIECES), pair]
    for joint in joined:  # two rows are copied once, with all layers
        mx.eval(joint.layer(0))
    gc.collect()
    before = mx.get_active_memory()
    pieces = [whole.layer(layer) for whole in (one, *joined) for layer in range(LAYERS)]
    mx.eval(pieces)
    assert mx.get_active_memory() - before < one.nbytes / LAYERS


@pytest.mark.parametrize("least", [1, 2**30])
def test_the_tokens_that_follow_get_columns_of_zeros(
    least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the same numbers as without; of rows with one chain or several, and large pieces."""
    monkeypatch.setattr(bundle, "LARGE_PIECE_BYTES", least)
    a, b, c = (block(seed) for seed in range(3))
    for rows in ([[a, b]], [[a]], [[a, b], [a, c]], [[a, b], [a, b]]):
        joined = Joined(rows, num_following=5)
        for layer in range(LAYERS):
            for one, other in zip(joined.layer(layer), wanted(rows, layer), strict=True):
                assert mx.array_equal(one[..., :-5, :], other)
                assert one.shape[-2] == other.shape[-2] + 5 and not one[..., -5:, :].any()


def addresses(rows: PrefillRows) -> list[int]:
    """Where the computed arrays lie in memory."""
    mx.eval(rows.arrays)
    return [np.asarray(array).__array_interface__["data"][0] for array in rows.arrays]


@pytest.mark.parametrize("scheme", ["float", "affine8"])
@pytest.mark.parametrize("joins_with_room", [True, False])
def test_a_chunk_after_blocks_from_memory_is_as_after_computed_ones(
    joins_with_room: bool, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, and the blocks in memory stay as they are. With room nothing is copied again."""
    monkeypatch.setattr(bundle, "LARGE_PIECE_BYTES", 1)
    kinds = [attention_kind(scheme) for _ in range(LAYERS)]
    cache = PrefixCache(2**30, Costs(1, {}, 0), kinds)
    end = 2 * BLOCK_TOKENS
    prompt = [1 + 7 * token % 50 for token in range(end + 9)]
    row = Row("a", prompt, Generation(1))
    cache.name(row)
    backend = x86(joins_with_room=joins_with_room)
    whole, after = (PrefillRows(backend, kinds, len(prompt), end) for _ in range(2))
    append_chunk(whole, [prompt], 0, end)
    cache.publish([row], whole, 0, end)
    before = bits(cache._blocks[row.block_keys[1]].parts[Kind.KV].arrays)
    row.num_cached = end
    fill(after, [row], cache)
    filled = addresses(after)
    for prefill in (whole, after):
        append_chunk(prefill, [prompt], end, 9)
    assert (addresses(after) == filled) == joins_with_room
    for one, other in zip(after.row(0, len(prompt)), whole.row(0, len(prompt)), strict=True):
        assert bits(one) == bits(other)
    assert bits(cache._blocks[row.block_keys[1]].parts[Kind.KV].arrays) == before


def test_all_layers_of_a_shared_prefix_are_joined_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device copies the blocks of each joint by itself, and starting that takes the host long."""
    kinds = [attention_kind("affine8") for _ in range(LAYERS)]
    cache = PrefixCache(2**30, Costs(1, {}, 0), kinds)
    prompt = [1 + 7 * token % 50 for token in range(3 * BLOCK_TOKENS + 9)]
    row = Row("a", prompt, Generation(1))
    cache.name(row)
    prefill = PrefillRows(BACKEND, kinds, len(prompt), len(prompt))
    append_chunk(prefill, [prompt], 0, len(prompt))
    cache.publish([row], prefill, 0, len(prompt))
    real, joints = mx.concatenate, []

    def noting(arrays: list[mx.array], axis: int = 0) -> mx.array:
        joints.append(axis)
        return real(arrays, axis=axis)

    monkeypatch.setattr(mx, "concatenate", noting)
    pieces = cache.prefix_pieces(row, BLOCK_TOKENS, 3 * BLOCK_TOKENS)
    assert pieces is not None and len(pieces) == LAYERS
    assert len(joints) == len(cache._blocks[row.block_keys[1]].parts[Kind.KV].arrays) < 6
    for index, layer in enumerate(prefill.layers):
        for one, other in zip(
            pieces[index], layer.row(0, 3 * BLOCK_TOKENS, BLOCK_TOKENS), strict=True
        ):
            assert mx.array_equal(one, other)
    row.block_keys[1] = b"another"
    assert cache.prefix_pieces(row, 0, 3 * BLOCK_TOKENS) is None
