"""Weights of scores that stand in memory: by MLX's softmax, or by powers of two.

Where ``powers`` finds those faster, softmax is put together from them: 2 to the score times
log2(e), less the highest. Half precision, and every device that has a fast exponential, keep MLX's
own.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from batchkv_worker.kv.powers import LOG2_E, exp2

# What is masked counts as 2 to this, which no float32 notices.
_LEAST = -100.0


def unit(*, powers: bool) -> float:
    """What scores are to be multiplied with, beyond their scale, to be weighed by powers or not."""
    return LOG2_E if powers else 1.0


def weigh(
    parts: Sequence[mx.array], sinks: mx.array | None = None, *, powers: bool
) -> tuple[list[mx.array], mx.array | None]:
    """Weights of scores ``[..., columns]`` that stand in several arrays, each in its shape.

    Scores are in ``unit(powers=powers)``. ``sinks``, as the model has them and such that they
    broadcast to ``[..., 1]``, take their share. Returns the weights, and what the sum of weighted
    values is still to be divided by, ``[..., 1]``, or None.
    """
    if powers:
        weights, total, _ = _weigh_by_powers(parts, sinks)
        return weights, total
    joined = list(parts)
    if sinks is not None:
        lines = (*parts[0].shape[:-1], 1)
        joined.append(mx.broadcast_to(sinks.astype(parts[0].dtype), lines))
    if len(joined) == 1:
        return [mx.softmax(joined[0], axis=-1, precise=True)], None
    whole = mx.softmax(mx.concatenate(joined, axis=-1), axis=-1, precise=True)
    found, low = [], 0
    for part in parts:
        found.append(whole[..., low : low + part.shape[-1]])
        low += part.shape[-1]
    return found, None


def weigh_alone(scores: mx.array, *, powers: bool) -> tuple[mx.array, mx.array | None, mx.array]:
    """``weigh`` for scores ``[..., columns]`` of which others are weighed elsewhere.

    Returns the weights, what the sum of weighted values is to be divided by, and, ``[..., 1]`` in
    float32, the one score that has the weight of them all.
    """
    if not powers:
        # That score stands for all, so that half precision would not do: its error is nobody's
        # average.
        scores, dtype = scores.astype(mx.float32), scores.dtype
        weights = mx.softmax(scores, axis=-1).astype(dtype)
        return weights, None, mx.logsumexp(scores, axis=-1, keepdims=True)
    (weights,), total, top = _weigh_by_powers([scores], None)
    return weights, total, top + mx.log2(total)


def _weigh_by_powers(
    parts: Sequence[mx.array], sinks: mx.array | None
) -> tuple[list[mx.array], mx.array, mx.array]:
    """Weights, their sum, and the highest score, which has the weight 1."""
    tops = [part.max(axis=-1, keepdims=True) for part in parts]
    if sinks is not None:
        sinks = sinks.astype(parts[0].dtype) * LOG2_E
        tops.append(sinks)
    top = tops[0]
    for other in tops[1:]:
        top = mx.maximum(top, other)
    weights = [exp2(mx.maximum(part - top, _LEAST)) for part in parts]
    total = weights[0].sum(axis=-1, keepdims=True)
    for other in weights[1:]:
        total = total + other.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + exp2(mx.maximum(sinks - top, _LEAST))
    return weights, total, top
