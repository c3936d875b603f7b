"""Weights of scores that stand in memory: by MLX's softmax, or by powers of two.

Where ``exp2`` finds those faster, softmax is put together from them: 2 to the score times
log2(e), less the highest. Half precision, and every device that has a fast exponential, keep MLX's
own.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from batchkv_worker.kv.backends.cpu.exp2 import LOG2_E, exp2, powers_are_faster

# What is added to scores that nobody is to see, in ``unit`` or not.
HIDDEN = -1e30
# What is masked counts as 2 to this, which no float32 notices.
_LEAST = -100.0


def unit(*, powers: bool) -> float:
    """What scores are to be multiplied with, beyond their scale, to be weighed by powers or not."""
    return LOG2_E if powers else 1.0


def to_add(mask: mx.array) -> mx.array:
    """What is added to scores, in float32, for those that a bool ``mask`` hides not to count."""
    return mx.where(mask, mx.array(0.0), mx.array(HIDDEN))


def as_in_steps(mask: mx.array, dtype: mx.Dtype) -> mx.array:
    """A bool mask in the form that groups of rows have it in, where keys are of ``dtype``."""
    return to_add(mask) if powers_are_faster(dtype) else mask


def hide(scores: mx.array, mask: mx.array) -> mx.array:
    """Scores of which those that ``mask`` hides count as nothing.

    The mask is bool, true where scores are seen, or made by ``to_add``: that is less work where
    choices are not vectorized, but it hides neither NaN nor what is infinite.
    """
    if mask.dtype == mx.bool_:
        return mx.where(mask, scores, mx.finfo(scores.dtype).min)
    return scores + mask


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
    total = _sum(weights[0])
    for other in weights[1:]:
        total = total + _sum(other)
    if sinks is not None:
        total = total + exp2(mx.maximum(sinks - top, _LEAST))
    return weights, total, top


def _sum(weights: mx.array) -> mx.array:
    """Over the columns, ``[..., 1]``: as a product, since MLX adds one number after another."""
    return weights @ mx.ones((weights.shape[-1], 1), weights.dtype)
