"""Causal attention of a chunk, cut into tiles of its tokens, for a CPU.

MLX's CPU backend computes the whole of a causal attention and then masks half of it. A tile of
tokens is attended to what stands before it, which needs no mask, and to itself, a triangle.
"""

from __future__ import annotations

import mlx.core as mx

from batchkv_worker.kv.backends.cpu import softmax
from batchkv_worker.kv.backends.cpu.exp2 import powers_are_faster

TILE = 64  # tokens


def are_cut() -> bool:
    """Whether that is worth it: where no fused kernel is."""
    return bool(mx.default_device() == mx.Device(mx.cpu))


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    sinks: mx.array | None = None,
) -> mx.array:
    """``queries`` ``[rows, heads, tokens, size]`` over ``keys`` and ``values`` ``[rows, kv heads,
    columns, size]``, whose last columns are of the same tokens: as MLX's own with a causal mask.
    """
    tokens = queries.shape[2]
    past = keys.shape[2] - tokens
    powers = powers_are_faster(queries.dtype)
    if powers:
        queries = queries * (scale * softmax.unit(powers=True))
    tiles = []
    for low in range(0, tokens, TILE):
        tile, seen = queries[:, :, low : low + TILE], past + low + TILE
        both = keys[:, :, :seen], values[:, :, :seen]
        if powers:
            tiles.append(_weighed(tile, *both, sinks))
        else:
            attention = mx.fast.scaled_dot_product_attention
            tiles.append(attention(tile, *both, scale=scale, mask="causal", sinks=sinks))
    return tiles[0] if len(tiles) == 1 else mx.concatenate(tiles, axis=2)


def _weighed(
    queries: mx.array, keys: mx.array, values: mx.array, sinks: mx.array | None
) -> mx.array:
    """One tile by powers of two, its queries scaled; the last columns are its own tokens.

    Heads that share a KV head are lines of one product, so that it is packed once for them.
    """
    rows, heads, count, size = queries.shape
    kv_heads = keys.shape[1]
    past, shared = keys.shape[2] - count, heads // kv_heads
    if sinks is not None:
        sinks = sinks.reshape(1, kv_heads, shared, 1, 1)
    lines = queries.reshape(rows, kv_heads, shared * count, size)
    ends = [(past, past + count), *([(0, past)] if past else [])]
    parts = []
    for low, high in ends:
        scores = lines @ keys[:, :, low:high].swapaxes(-1, -2)
        parts.append(scores.reshape(rows, kv_heads, shared, count, high - low))
    sees = mx.arange(count)[:, None] >= mx.arange(count)
    parts[0] = softmax.hide(parts[0], sees)
    weights, total = softmax.weigh(parts, sinks, powers=True)
    out = None
    for (low, high), part in zip(ends, weights, strict=True):
        product = part.reshape(rows, kv_heads, shared * count, high - low) @ values[:, :, low:high]
        out = product if out is None else out + product
    assert out is not None and total is not None
    out = out.reshape(rows, kv_heads, shared, count, values.shape[-1]) / total
    return out.reshape(rows, heads, count, values.shape[-1])
