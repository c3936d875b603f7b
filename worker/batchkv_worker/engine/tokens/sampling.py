"""Chooses tokens: one call for all rows, whatever their parameters.

Random numbers come from the host. A row's n-th token is drawn with the n-th number of a stream that
depends on the row's seed alone (SplitMix64), by inverting the cumulative distribution. So the same
logits give the same token, whatever the other rows, the slot, or the backend's generator. Filters
follow mlx-lm's ``make_sampler``: top_p, min_p and top_k see the distribution without temperature.
The temperature applies to the tokens that they keep.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx

from batchkv_worker.sequence import Sequence

PENALTY_CONTEXT = 20  # tokens that a repetition penalty looks back at, as in mlx-lm

_MASK = (1 << 64) - 1


def uniform(seed: int, index: int) -> float:
    """The ``index``-th number of a seed's stream, in [0, 1)."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((z ^ (z >> 31)) >> 11) / (1 << 53)


@dataclass(frozen=True, slots=True)
class Sampled:
    """A step's outcome, lazy: tokens ``[rows]``, and for rows that ask their log-probabilities.

    ``chosen`` is ``[rows]``, ``top_tokens`` and ``top_logprobs`` are ``[rows, count]`` in falling
    order; all None when no row asks.
    """

    tokens: mx.array
    chosen: mx.array | None = None
    top_tokens: mx.array | None = None
    top_logprobs: mx.array | None = None

    @property
    def arrays(self) -> list[mx.array]:
        everything = (self.tokens, self.chosen, self.top_tokens, self.top_logprobs)
        return [array for array in everything if array is not None]


def sample(logits: mx.array, inputs: mx.array, rows: list[Sequence | None]) -> Sampled:
    """Choose a token for each row of ``logits`` ``[rows, vocabulary]``.

    ``inputs`` ``[rows]`` are the tokens just fed, which the rows may not have read back yet.
    Rows that are None (free slots) get some token.
    """
    active = [row for row in rows if row is not None]
    if any(row.generation.repetition_penalty != 1 for row in active):
        logits = _penalize(logits, inputs, rows)
    tokens = mx.argmax(logits, axis=-1)
    if not all(row.generation.is_greedy for row in active):
        is_greedy = mx.array([row is None or row.generation.is_greedy for row in rows])
        tokens = mx.where(is_greedy, tokens, _draw(logits.astype(mx.float32), rows))
    wanted = [row.generation.logprobs for row in active if row.generation.logprobs is not None]
    if not wanted:
        return Sampled(tokens)
    return _with_logprobs(logits.astype(mx.float32), tokens, max(wanted))


def _penalize(logits: mx.array, inputs: mx.array, rows: list[Sequence | None]) -> mx.array:
    """mlx-lm's repetition penalty over the last tokens, for all rows at once.

    A token that stands twice is penalized once: both writes carry the same value.
    """
    known = PENALTY_CONTEXT - 1
    host = [[0] * known if row is None else row.last_tokens(known) for row in rows]
    recent = mx.concatenate([mx.array(host), inputs.reshape(-1, 1).astype(mx.int32)], axis=1)
    penalty = mx.array(
        [[1.0 if row is None else row.generation.repetition_penalty] for row in rows], logits.dtype
    )
    chosen = mx.take_along_axis(logits, recent, axis=-1)
    chosen = mx.where(chosen < 0, chosen * penalty, chosen / penalty)
    return mx.put_along_axis(logits, recent, chosen, axis=-1)


def _draw(logits: mx.array, rows: list[Sequence | None]) -> mx.array:
    """One random token a row; ``logits`` float32."""
    numbers, temperatures = [], []
    for row in rows:
        greedy = row is None or row.generation.is_greedy
        temperatures.append([1.0 if greedy else row.generation.temperature])  # type: ignore[union-attr]
        numbers.append([0.0 if greedy else uniform(row.generation.seed, row.num_dispatched)])  # type: ignore[union-attr]
    points, temperature = mx.array(numbers), mx.array(temperatures)
    if not any(row is not None and row.generation.has_filter for row in rows):
        return _invert(logits / temperature, points)
    order = mx.argsort(-logits, axis=-1)
    kept = _kept(mx.take_along_axis(logits, order, axis=-1), rows)
    # Back in the vocabulary's order: what a row draws must not depend on its neighbours' filters.
    kept = mx.put_along_axis(mx.zeros_like(kept), order, kept, axis=-1)
    return _invert(mx.where(kept, logits / temperature, -math.inf), points)


def _kept(ranked: mx.array, rows: list[Sequence | None]) -> mx.array:
    """Which of the logits, in falling order, a row's filters leave; the first always."""
    settings = [
        (1.0, 0, 0.0)
        if row is None
        else (row.generation.top_p, row.generation.top_k, row.generation.min_p)
        for row in rows
    ]
    vocabulary = ranked.shape[-1]
    top_p = mx.array([[p if p < 1 else 2.0] for p, _, _ in settings])
    top_k = mx.array([[k or vocabulary] for _, k, _ in settings])
    min_p = mx.array([[math.log(m) if m > 0 else -math.inf] for _, _, m in settings])
    probabilities = mx.softmax(ranked, axis=-1)
    above = mx.cumsum(probabilities, axis=-1) - probabilities
    rank = mx.arange(vocabulary)
    kept = (above < top_p) & (rank < top_k) & (ranked - ranked[:, :1] >= min_p)
    return kept | (rank == 0)


def _invert(logits: mx.array, points: mx.array) -> mx.array:
    """The index at which each row's cumulative distribution passes its point in [0, 1)."""
    weights = mx.softmax(logits, axis=-1)
    cumulative = mx.cumsum(weights, axis=-1)
    place = (cumulative <= points * cumulative[:, -1:]).sum(axis=-1)
    # Rounding may leave the point past the last index that has any weight.
    last = logits.shape[-1] - 1 - mx.argmax(weights[:, ::-1] > 0, axis=-1)
    return mx.minimum(place, last)


def _with_logprobs(logits: mx.array, tokens: mx.array, count: int) -> Sampled:
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logprobs, tokens.reshape(-1, 1), axis=-1).reshape(-1)
    if not count:
        return Sampled(tokens, chosen)
    count = min(count, logits.shape[-1])
    candidates = mx.argpartition(-logprobs, kth=count - 1, axis=-1)[:, :count]
    values = mx.take_along_axis(logprobs, candidates, axis=-1)
    order = mx.argsort(-values, axis=-1)
    return Sampled(
        tokens,
        chosen,
        mx.take_along_axis(candidates, order, axis=-1),
        mx.take_along_axis(values, order, axis=-1),
    )
