"""Chunks of prompts whose prefix is shared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from batchkv_worker.kv.attention.paths import LayerAttention
from batchkv_worker.kv.attention.shared_prefix import attend
from batchkv_worker.kv.backends.generic import largest_power
from batchkv_worker.kv.types import PackedKV

MAX_DENSE = 2**25  # numbers of dense keys and values at once: 64 MiB in half precision


def attend_chunk(
    layer: LayerAttention,
    queries: mx.array,
    shared: Sequence[PackedKV],
    own: PackedKV,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """``attend`` for a chunk of prompts; a ``mask`` that is a word means causal.

    ``shared`` are of all rows together, or of each row.

    If the backend has a fused kernel, a copy of the prefixes for each of a few rows, made for one
    layer and dropped, is faster than two products with scores in memory.
    """
    is_apart = shared[0][0][0].shape[0] > 1
    if is_apart and isinstance(mask, mx.array):
        before = sum(one[0][0].shape[-2] for one in shared)
        all_seen = mx.ones if mask.dtype == mx.bool_ else mx.zeros  # else it is added to scores
        seen = all_seen((*mask.shape[:-1], before), mask.dtype)
        mask = mx.concatenate([seen, mask], axis=-1)
    if is_apart or (layer.backend.has_fused_attention and not isinstance(mask, mx.array)):
        return _attend_dense(layer, queries, shared, own, scale, mask, sinks)
    if isinstance(mask, str):
        num_tokens, columns = queries.shape[2], own[0][0].shape[-2]
        mask = create_causal_mask(num_tokens, columns - num_tokens)
    return attend(layer, queries, shared, own, scale, mask, sinks)


def _attend_dense(
    layer: LayerAttention,
    queries: mx.array,
    shared: Sequence[PackedKV],
    own: PackedKV,
    scale: float,
    mask: Any,
    sinks: mx.array | None,
) -> mx.array:
    """The fused kernel over the prefixes and what comes after them, of a few rows at once."""
    scheme, dtype = layer.scheme, layer.dtype
    rotated = scheme.keys.rotate(queries)
    both = [
        (
            [tensor.unpack_stored(one[side], dtype) for one in shared],
            tensor.unpack_stored(own[side], dtype),
        )
        for side, tensor in enumerate((scheme.keys, scheme.values))
    ]
    of_row = sum(part[0].size for prefixes, rest in both for part in (*prefixes, rest))
    is_of_rows = isinstance(mask, mx.array) and mask.ndim == 4 and mask.shape[0] > 1
    found = []
    backend = layer.backend
    most = backend.most_joined if backend.joins_groups else MAX_DENSE
    for rows, num_known in _slices(queries.shape[0], most // of_row):
        keys, values = (_joined(prefixes, rest, rows) for prefixes, rest in both)
        given = mask[rows] if is_of_rows else mask
        out = backend.attention(rotated[rows], keys, values, scale, given, sinks)
        found.append(out[num_known:] if num_known else out)
    return scheme.values.unrotate(mx.concatenate(found, axis=0))


def _slices(num_rows: int, most: int) -> list[tuple[slice, int]]:
    """Parts of at most ``most`` rows, and how many rows of each are in the parts before.

    Parts of equal sizes, which are powers of two, need one plan on CUDA. So the last one begins
    with rows that are computed already.
    """
    size = largest_power(most)
    if num_rows <= size:
        return [(slice(0, num_rows), 0)]
    starts = range(0, num_rows, size)
    lows = [min(start, num_rows - size) for start in starts]
    return [(slice(low, low + size), start - low) for start, low in zip(starts, lows, strict=True)]


def _joined(shared: list[mx.array], own: mx.array, rows: slice) -> mx.array:
    """Of some rows the prefixes, then their own tokens, ``[rows, heads, tokens, size]``."""
    own = own[rows]
    before = [part if part.shape[0] == 1 else part[rows] for part in shared]
    lines = [mx.broadcast_to(part, (own.shape[0], *part.shape[1:])) for part in before]
    return mx.concatenate([*lines, own], axis=2)
