"""A prefix that several rows share, held once and attended once for all of them.

The layers that keep every token hold a row's own tokens only; what stands before them is the stem.
Its keys are multiplied with the queries of all its rows in one product, so that they are read once
and not once a row. Layers with a window or a state keep what they need of it in each row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from batchkv_worker.kv import softmax
from batchkv_worker.kv.attention import Path
from batchkv_worker.kv.layer import Both
from batchkv_worker.kv.schemes import LayerScheme

MAX_SCORES = 2**24  # numbers that may stand at once: 64 MiB in float32
MAX_DENSE = 2**25  # numbers of keys and values side by side: 64 MiB in half precision
_ranks = count(1)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Stem:
    """``key`` names its last block. By leaf of the model's caches: ``packed`` parts, as prefill
    reads them, and ``slots`` parts, as decode does. ``rank`` orders stems among each other.
    """

    key: bytes
    num_tokens: int
    packed: dict[int, Both]
    slots: dict[int, Both]
    rank: int = field(default_factory=lambda: next(_ranks))

    @property
    def arrays(self) -> list[mx.array]:
        """All that it holds."""
        found = [*self.packed.values(), *self.slots.values()]
        return [array for both in found for parts in both for array in parts]


def attend(
    path: Path | None,
    scheme: LayerScheme,
    dtype: mx.Dtype,
    queries: mx.array,
    stem: Both,
    own: Both,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attention of ``queries`` ``[rows, heads, tokens, size]`` over the stem and each row's own.

    ``mask`` says which of their own columns tokens see, ``[rows or 1, 1, tokens or 1, columns]``;
    of the stem they see all. ``path`` is how a row's own part is read. Returns what
    ``attention.attend`` does.
    """
    rows, heads, num_tokens, size = queries.shape
    columns = stem[0][0].shape[-2] + own[0][0].shape[-2]
    few = max(1, MAX_SCORES // (rows * heads * columns))
    if num_tokens > few:
        # Scores stand in memory as a whole here: of as many tokens at once as is bearable.
        one_for_all = mask is not None and mask.shape[-2] == 1
        parts = [
            attend(
                *(path, scheme, dtype, queries[:, :, low : low + few], stem, own, scale),
                mask if mask is None or one_for_all else mask[..., low : low + few, :],
                sinks,
            )
            for low in range(0, num_tokens, few)
        ]
        return mx.concatenate(parts, axis=2)
    kv_heads = scheme.shape.num_heads
    lines = heads // kv_heads * num_tokens
    powers = softmax.by_powers(queries.dtype)
    turned = scheme.keys.rotate(queries, scale * softmax.unit(powers=powers))
    turned = turned.reshape(rows, kv_heads, lines, size)
    far_keys = scheme.keys.unpack_stored(stem[0], dtype)
    far = _by_head(turned) @ far_keys.swapaxes(-1, -2)
    packed = path is not None and path.endswith("packed")
    if packed:
        near = scheme.keys.times(turned, own[0], transpose=True)
    else:
        near = turned @ scheme.keys.unpack_stored(own[0], dtype).swapaxes(-1, -2)
    if mask is not None:
        split = near.reshape(rows, heads, num_tokens, near.shape[-1])
        near = mx.where(mask, split, mx.finfo(near.dtype).min).reshape(near.shape)
    far_weights, near_weights, total = _weigh(far, near, sinks, num_tokens, powers=powers)
    out = far_weights @ scheme.values.unpack_stored(stem[1], dtype)
    out = out.reshape(kv_heads, rows, lines, -1).swapaxes(0, 1)
    if packed:
        out = out + scheme.values.times(near_weights, own[1], transpose=False)
    else:
        out = out + near_weights @ scheme.values.unpack_stored(own[1], dtype)
    if total is not None:
        out = out / total
    return scheme.values.unrotate(out.reshape(rows, heads, num_tokens, scheme.shape.value_size))


def copies_stems() -> bool:
    """Whether chunks of prompts are attended on copies of their stem: where a fused kernel is."""
    return bool(mx.default_device() == mx.Device(mx.gpu))


def attend_chunk(
    scheme: LayerScheme,
    dtype: mx.Dtype,
    queries: mx.array,
    stem: Both,
    own: Both,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """``attend`` for a chunk of prompts; a ``mask`` of a word is causal.

    A GPU is faster with its fused kernel on a copy of the stem for each of a few rows, made for one
    layer and dropped, than with scores that stand in memory. A CPU has no such kernel.
    """
    if copies_stems() and (isinstance(mask, str) or mask is None):
        return _attend_dense(scheme, dtype, queries, stem, own, scale, mask, sinks)
    if isinstance(mask, str):
        num_tokens, columns = queries.shape[2], own[0][0].shape[-2]
        mask = create_causal_mask(num_tokens, columns - num_tokens)
    return attend(None, scheme, dtype, queries, stem, own, scale, mask, sinks)


def _attend_dense(
    scheme: LayerScheme,
    dtype: mx.Dtype,
    queries: mx.array,
    stem: Both,
    own: Both,
    scale: float,
    mask: str | None,
    sinks: mx.array | None,
) -> mx.array:
    """The fused kernel over the stem and what comes after it, of a few rows at once."""
    turned = scheme.keys.rotate(queries)
    both = [
        (tensor.unpack_stored(shared, dtype), tensor.unpack_stored(parts, dtype))
        for tensor, shared, parts in zip((scheme.keys, scheme.values), stem, own, strict=True)
    ]
    few = max(1, MAX_DENSE // sum(far[0].size + near[0].size for far, near in both))
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


def _behind(shared: mx.array, own: mx.array) -> mx.array:
    """What each row has of its own after what all have, ``[rows, heads, tokens, size]``."""
    line = mx.broadcast_to(shared, (own.shape[0], *shared.shape[1:]))
    return mx.concatenate([line, own], axis=2)


def _weigh(
    far: mx.array, near: mx.array, sinks: mx.array | None, num_tokens: int, *, powers: bool
) -> tuple[mx.array, mx.array, mx.array | None]:
    """Weights of the stem's and of the rows' own scores, each in the shape of its scores.

    ``far`` is ``[1, kv heads, rows * lines, columns]``, ``near`` ``[rows, kv heads, lines,
    columns]``. Put together heads first, the large part is copied once. With them what the weighted
    values are to be divided by, ``[rows, kv heads, lines, 1]``, or None.
    """
    rows, kv_heads, lines, _ = near.shape
    if sinks is not None:
        sinks = mx.repeat(sinks, num_tokens).reshape(kv_heads, 1, lines, 1)
    parts = [far.reshape(kv_heads, rows, lines, far.shape[-1]), near.swapaxes(0, 1)]
    weights, total = softmax.weigh(parts, sinks, powers=powers)
    total = None if total is None else total.swapaxes(0, 1)
    return weights[0].reshape(far.shape), weights[1].swapaxes(0, 1), total


def _by_head(x: mx.array) -> mx.array:
    """``[rows, kv heads, lines, size]`` as ``[1, kv heads, rows * lines, size]``."""
    rows, kv_heads, lines, size = x.shape
    return x.swapaxes(0, 1).reshape(1, kv_heads, rows * lines, size)
