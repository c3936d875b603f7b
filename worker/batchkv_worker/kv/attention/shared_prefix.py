"""A prefix that several rows share, stored once and attended once for all of them.

The layers that keep every token store a row's own tokens only; the tokens before them are the
shared prefix. Its keys are multiplied with the queries of all its rows in one product, so that they
are read once and not once a row. Layers with a window or a state keep their part of it in each row.

Shared prefixes form chains: a longer prefix that only some of a prefix's rows share is a prefix of
its own, whose ``parent`` is the shorter one. It stores the tokens after its parent only. Rows read
the whole chain.

Rows are attended in groups, of one prefix and of like length. A prefix that several groups have in
common is attended once for the rows of all of them (``attend_partial``). The partial result (output
and log-sum-exp) enters each group's softmax as one extra column: attention over many tokens equals
attention over one token whose score is the logarithm of the sum of their exponentials and whose
value is the output of attention over them alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from batchkv_worker.kv.attention.paths import LayerAttention, scores_of, weighted_values
from batchkv_worker.kv.attention.prefix_part import PrefixPart
from batchkv_worker.kv.backends.contract import Softmax
from batchkv_worker.kv.backends.softmax import hide
from batchkv_worker.kv.types import PackedKV

MAX_SCORES = 2**24  # scores in memory at once: 64 MiB in float32


@dataclass(slots=True, eq=False)
class SharedPrefix(PrefixPart):
    """A part of a chain with its arrays, by leaf of the model's caches.

    ``packed`` is the form for prefill, ``slots`` that for decode; both have the tokens after the
    parent.
    """

    packed: dict[int, PackedKV] = field(kw_only=True)
    slots: dict[int, PackedKV] = field(kw_only=True)

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays of this part alone."""
        found = [*self.packed.values(), *self.slots.values()]
        return [array for both in found for parts in both for array in parts]


@dataclass(frozen=True, slots=True)
class PartialAttention:
    """Attention of one token of each row over a shared prefix alone.

    ``score``, the log-sum-exp of its scores, is ``[kv heads, rows, lines, 1]`` in float32.
    ``value``, its output, is ``[kv heads, rows, lines, size]`` in the basis of storage. ``lines``
    are the query heads that share a KV head.
    """

    score: mx.array
    value: mx.array

    def of(self, rows: slice) -> PartialAttention:
        """The partial results of some of the rows."""
        return PartialAttention(self.score[:, rows], self.value[:, rows])


def attend_partial(
    layer: LayerAttention, queries: mx.array, shared: PackedKV, scale: float
) -> PartialAttention:
    """Attention of ``queries`` ``[rows, heads, 1, size]`` over one shared prefix."""
    rows, heads, _, size = queries.shape
    few = max(1, MAX_SCORES // (heads * shared[0][0].shape[-2]))
    if rows > few:
        parts = [
            attend_partial(layer, queries[low : low + few], shared, scale)
            for low in range(0, rows, few)
        ]
        scores, found = zip(*((part.score, part.value) for part in parts), strict=True)
        return PartialAttention(mx.concatenate(scores, axis=1), mx.concatenate(found, axis=1))
    kv_heads = layer.scheme.shape.num_heads
    softmax = layer.softmax(queries)
    rotated = layer.scheme.keys.rotate(queries, scale * softmax.unit)
    together = _by_head(rotated.reshape(rows, kv_heads, heads // kv_heads, size))
    weights, total, score = softmax.weigh_alone(scores_of(layer, together, shared[0]))
    value = weighted_values(layer, weights, shared[1])
    if total is not None:
        value = value / total
    shape = (kv_heads, rows, heads // kv_heads, -1)
    return PartialAttention(score.reshape(shape), value.reshape(shape))


def attend(
    layer: LayerAttention,
    queries: mx.array,
    shared: Sequence[PackedKV],
    own: PackedKV,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
    partials: Sequence[PartialAttention] = (),
) -> mx.array:
    """Attention of ``queries`` ``[rows, heads, tokens, size]`` over shared prefixes and own tokens.

    ``shared`` is a chain of prefixes. ``partials`` are the results of prefixes that were attended
    already, for one token a row. ``mask`` says which of their own columns tokens see, ``[rows or 1,
    1, tokens or 1, columns]``; of the prefixes they see all. Returns what ``paths.attend`` does.
    """
    rows, heads, num_tokens, size = queries.shape
    columns = sum(keys[0].shape[-2] for keys, _ in (*shared, own))
    few = max(1, MAX_SCORES // (rows * heads * columns))
    if num_tokens > few:
        # Whole scores are in memory here, so only as many tokens are computed at once as fit.
        parts = [
            attend(
                *(layer, queries[:, :, low : low + few], shared, own, scale),
                mask if mask is None or mask.shape[-2] == 1 else mask[..., low : low + few, :],
                sinks,
            )
            for low in range(0, num_tokens, few)
        ]
        return mx.concatenate(parts, axis=2)
    scheme, softmax = layer.scheme, layer.softmax(queries)
    kv_heads = scheme.shape.num_heads
    lines = heads // kv_heads * num_tokens
    rotated = scheme.keys.rotate(queries, scale * softmax.unit)
    rotated = rotated.reshape(rows, kv_heads, lines, size)
    together = _by_head(rotated)
    prefix_scores = [scores_of(layer, together, keys) for keys, _ in shared]
    own_scores = scores_of(layer, rotated, own[0], packed=layer.is_packed)
    if mask is not None:
        split = own_scores.reshape(rows, heads, num_tokens, own_scores.shape[-1])
        own_scores = hide(split, mask).reshape(own_scores.shape)
    weights, total = _weigh(softmax, prefix_scores, partials, own_scores, sinks, num_tokens)
    found = [
        weighted_values(layer, weight, values).reshape(kv_heads, rows, lines, -1)
        for weight, (_, values) in zip(weights, shared, strict=False)
    ]
    of_partials = weights[len(shared) : -1]
    found += [weight * one.value for weight, one in zip(of_partials, partials, strict=True)]
    out = sum(found[1:], found[0]).swapaxes(0, 1)
    out = out + weighted_values(layer, weights[-1], own[1], packed=layer.is_packed)
    if total is not None:
        out = out / total
    return scheme.values.unrotate(out.reshape(rows, heads, num_tokens, scheme.shape.value_size))


def _weigh(
    softmax: Softmax,
    prefix_scores: list[mx.array],
    partials: Sequence[PartialAttention],
    own_scores: mx.array,
    sinks: mx.array | None,
    num_tokens: int,
) -> tuple[list[mx.array], mx.array | None]:
    """Weights of prefixes, of partial results and of the rows' own tokens, in their scores' shapes.

    ``prefix_scores`` are ``[1, kv heads, rows * lines, columns]``, ``own_scores`` ``[rows, kv
    heads, lines, columns]``. With the heads first, the large parts are copied once. Also returns
    the divisor of the weighted values, ``[rows, kv heads, lines, 1]``, or None.
    """
    rows, kv_heads, lines, _ = own_scores.shape
    if sinks is not None:
        sinks = mx.repeat(sinks, num_tokens).reshape(kv_heads, 1, lines, 1)
    parts = [part.reshape(kv_heads, rows, lines, part.shape[-1]) for part in prefix_scores]
    parts += [one.score for one in partials]
    weights, total = softmax.weigh([*parts, own_scores.swapaxes(0, 1)], sinks)
    if partials:  # their scores are in float32, and so are the weights
        weights = [part.astype(own_scores.dtype) for part in weights]
    weights[: len(prefix_scores)] = [
        part.reshape(scores.shape) for part, scores in zip(weights, prefix_scores, strict=False)
    ]
    weights[-1] = weights[-1].swapaxes(0, 1)
    return weights, None if total is None else total.swapaxes(0, 1)


def _by_head(x: mx.array) -> mx.array:
    """``[rows, kv heads, lines, size]`` as ``[1, kv heads, rows * lines, size]``."""
    rows, kv_heads, lines, size = x.shape
    return x.swapaxes(0, 1).reshape(1, kv_heads, rows * lines, size)
