"""Weights of scores in memory, by MLX's own softmax; and masks of scores."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx


def hide(scores: mx.array, mask: mx.array) -> mx.array:
    """The scores, changed so that those that ``mask`` hides get no weight.

    A bool mask is true where scores are seen. Any other mask is added to the scores.
    """
    if mask.dtype == mx.bool_:
        return mx.where(mask, scores, mx.finfo(scores.dtype).min)
    return scores + mask


class MlxSoftmax:
    """For devices with a fast exponential, and for half precision."""

    unit = 1.0

    def weigh(
        self, parts: Sequence[mx.array], sinks: mx.array | None = None
    ) -> tuple[list[mx.array], mx.array | None]:
        """One softmax over all parts; nothing is left to divide by."""
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

    def weigh_alone(self, scores: mx.array) -> tuple[mx.array, mx.array | None, mx.array]:
        """In float32, because an error of the log-sum-exp would affect all scores alike."""
        scores, dtype = scores.astype(mx.float32), scores.dtype
        weights = mx.softmax(scores, axis=-1).astype(dtype)
        return weights, None, mx.logsumexp(scores, axis=-1, keepdims=True)


MLX_SOFTMAX = MlxSoftmax()
