"""Causal attention of a chunk, cut into tiles of its tokens, for a CPU.

MLX's CPU backend computes the whole of a causal attention and then masks half of it. Here a tile of
tokens is attended to all tokens before it, which needs no mask, and to itself, a triangle.
"""

from __future__ import annotations

import mlx.core as mx

from batchkv_worker.kv.backends.cpu.softmax import Exp2Softmax
from batchkv_worker.kv.backends.softmax import hide

TILE = 64  # tokens


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    sinks: mx.array | None = None,
    softmax: Exp2Softmax | None = None,
) -> mx.array:
    """As MLX's own attention with a causal mask.

    ``queries`` are ``[rows, heads, tokens, size]``, ``keys`` and ``values`` ``[rows, kv heads,
    columns, size]``; the last columns are of the same tokens. ``softmax`` None weighs by MLX's own.
    """
    tokens = queries.shape[2]
    past = keys.shape[2] - tokens
    if softmax is not None:
        queries = queries * (scale * softmax.unit)
    tiles = []
    for low in range(0, tokens, TILE):
        tile, seen = queries[:, :, low : low + TILE], past + low + TILE
        both = keys[:, :, :seen], values[:, :, :seen]
        if softmax is not None:
            tiles.append(_attend_tile(softmax, tile, *both, sinks))
        else:
            attention = mx.fast.scaled_dot_product_attention
            tiles.append(attention(tile, *both, scale=scale, mask="causal", sinks=sinks))
    return tiles[0] if len(tiles) == 1 else mx.concatenate(tiles, axis=2)


def _attend_tile(
    softmax: Exp2Softmax,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    sinks: mx.array | None,
) -> mx.array:
    """One tile, its queries scaled; the last columns are its own tokens.

    Heads that share a KV head are lines of one product, so that BLAS packs the head's keys once.
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
    parts[0] = hide(parts[0], sees)
    weights, total = softmax.weigh(parts, sinks)
    out = None
    for (low, high), part in zip(ends, weights, strict=True):
        product = part.reshape(rows, kv_heads, shared * count, high - low) @ values[:, :, low:high]
        out = product if out is None else out + product
    assert out is not None
    out = out.reshape(rows, kv_heads, shared, count, values.shape[-1]) / total
    return out.reshape(rows, heads, count, values.shape[-1])
