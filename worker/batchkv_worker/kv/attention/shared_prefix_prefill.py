"""Chunks of prompts that come behind stems."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from batchkv_worker.kv.attention.shared_prefix import attend
from batchkv_worker.kv.schemes.packing import LayerScheme
from batchkv_worker.kv.types import Both

MAX_DENSE = 2**25  # numbers of keys and values side by side: 64 MiB in half precision


def copies_stems() -> bool:
    """Whether chunks of prompts are attended on copies of their stem: where a fused kernel is."""
    return bool(mx.default_device() == mx.Device(mx.gpu))


def attend_chunk(
    scheme: LayerScheme,
    dtype: mx.Dtype,
    queries: mx.array,
    shared: Sequence[Both],
    own: Both,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """``attend`` for a chunk of prompts; a ``mask`` of a word is causal.

    A GPU is faster with its fused kernel on a copy of the stems for each of a few rows, made for
    one layer and dropped, than with scores that stand in memory. A CPU has no such kernel.
    """
    if copies_stems() and (isinstance(mask, str) or mask is None):
        return _attend_dense(scheme, dtype, queries, shared, own, scale, mask, sinks)
    if isinstance(mask, str):
        num_tokens, columns = queries.shape[2], own[0][0].shape[-2]
        mask = create_causal_mask(num_tokens, columns - num_tokens)
    return attend(None, scheme, dtype, queries, shared, own, scale, mask, sinks)


def _attend_dense(
    scheme: LayerScheme,
    dtype: mx.Dtype,
    queries: mx.array,
    shared: Sequence[Both],
    own: Both,
    scale: float,
    mask: str | None,
    sinks: mx.array | None,
) -> mx.array:
    """The fused kernel over the stems and what comes after them, of a few rows at once."""
    turned = scheme.keys.rotate(queries)
    both = [
        (
            [tensor.unpack_stored(one[side], dtype) for one in shared],
            tensor.unpack_stored(own[side], dtype),
        )
        for side, tensor in enumerate((scheme.keys, scheme.values))
    ]
    of_row = sum(part[0].size for far, near in both for part in (*far, near))
    few = max(1, MAX_DENSE // of_row)
    found = []
    for low in range(0, queries.shape[0], few):
        keys, values = (_behind(far, near[low : low + few]) for far, near in both)
        some = turned[low : low + few]
        found.append(
            mx.fast.scaled_dot_product_attention(
                some, keys, values, scale=scale, mask=mask, sinks=sinks
            )
        )
    return scheme.values.unrotate(mx.concatenate(found, axis=0))


def _behind(shared: list[mx.array], own: mx.array) -> mx.array:
    """What each row has of its own after what all have, ``[rows, heads, tokens, size]``."""
    lines = [mx.broadcast_to(part, (own.shape[0], *part.shape[1:])) for part in shared]
    return mx.concatenate([*lines, own], axis=2)
