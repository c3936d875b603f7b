"""Chooses tokens: one call for all rows, whatever their parameters.

Random numbers come from the host. A row's n-th token is drawn with the n-th number of a stream that
depends on the row's seed alone (SplitMix64), by inverting the cumulative distribution. So the same
logits give the same token, whatever the other rows, the slot, or the backend's generator. Filters
follow mlx-lm's ``make_sampler``: top_p, min_p and top_k see the distribution without temperature.
The temperature applies to the tokens that they keep.

Log-probabilities are the model's own: before biases, penalties and masks, filters and temperature.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from batchkv_worker.engine.tokens.biases import add_biases, is_biased
from batchkv_worker.engine.tokens.guide import doubted_of, masked, without_doubted
from batchkv_worker.engine.tokens.largest import MAX_COUNT, largest
from batchkv_worker.engine.tokens.penalties import penalize
from batchkv_worker.kv.backends.contract import DrawKernel
from batchkv_worker.sequence import Generation, Sequence

log = logging.getLogger("batchkv.engine")

FEW_STEP = 16  # counts of likeliest tokens are rounded up to this: a GPU prepares for each shape

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


def sample(
    logits: mx.array,
    inputs: mx.array,
    rows: list[Sequence | None],
    masks: NDArray[np.uint32] | None = None,
    few: FewTokens | None = None,
) -> Sampled:
    """Choose a token for each row of ``logits`` ``[rows, vocabulary]``.

    ``inputs`` ``[rows]`` are the tokens just fed, which the rows may not have read back yet.
    Rows that are None (free slots) get some token. ``masks`` ``[rows, words]`` have a bit for each
    token that a row's guide allows; None when no row has a guide. ``few`` draws for rows with a
    small ``top_k``; None: with operations of MLX.
    """
    active = [row for row in rows if row is not None]
    of_model = logits
    if any(is_biased(row) for row in active):
        logits = add_biases(logits, inputs, rows)
    if any(row.generation.is_penalized for row in active):
        logits = penalize(logits, inputs, rows)
    if masks is not None:
        doubted = [
            () if row is None else doubted_of(row.guide, mask)
            for row, mask in zip(rows, masks, strict=True)
        ]
        logits = without_doubted(masked(logits, masks), logits, doubted)
    is_greedy = [row is None or row.generation.is_greedy for row in rows]
    if all(is_greedy):
        tokens = mx.argmax(logits, axis=-1)
    else:
        tokens = _draw(logits.astype(mx.float32), rows, few or FewTokens(None))
        if any(row.generation.is_greedy for row in active):
            tokens = mx.where(mx.array(is_greedy), mx.argmax(logits, axis=-1), tokens)
    wanted = [row.generation.logprobs for row in active if row.generation.logprobs is not None]
    if not wanted:
        return Sampled(tokens)
    return _with_logprobs(of_model.astype(mx.float32), tokens, max(wanted))


def _draw(logits: mx.array, rows: list[Sequence | None], of_few_tokens: FewTokens) -> mx.array:
    """One random token a row; ``logits`` float32.

    A row with a small ``top_k`` draws from those few tokens alone, whatever its neighbours need.
    """
    sampled = [None if row is None or row.generation.is_greedy else row for row in rows]
    draw = _Draw(
        mx.array(
            [[0.0 if r is None else uniform(r.generation.seed, r.num_dispatched)] for r in sampled]
        ),
        mx.array([[1.0 if r is None else r.generation.temperature] for r in sampled]),
        [_NO_FILTER if r is None else _Filter.of(r.generation) for r in sampled],
    )
    of_few = [one.is_of_few for one in draw.filters]
    others = [r for r, is_few in zip(sampled, of_few, strict=True) if r is not None and not is_few]
    if not any(of_few):
        return _draw_of_all(logits, draw)
    few = of_few_tokens.draw(logits, draw)
    return mx.where(mx.array(of_few), few, _draw_of_all(logits, draw)) if others else few


@dataclass(frozen=True, slots=True)
class _Filter:
    """Which of the likeliest tokens a row may draw; ``top_k`` 0 is any number."""

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @classmethod
    def of(cls, generation: Generation) -> _Filter:
        return cls(generation.top_p, generation.top_k, generation.min_p)

    @property
    def is_of_few(self) -> bool:
        """Whether the row draws one of so few tokens that finding these is faster than sorting."""
        return 0 < self.top_k <= MAX_COUNT

    @property
    def top_p_limit(self) -> float:
        """What the weights of likelier tokens stay below; 1 would cut tokens by rounding."""
        return self.top_p if self.top_p < 1 else 2.0

    @property
    def log_min_p(self) -> float:
        return math.log(self.min_p) if self.min_p > 0 else -math.inf


_NO_FILTER = _Filter()


@dataclass(frozen=True, slots=True)
class _Draw:
    """One draw of each row: ``points`` in [0, 1) and ``temperatures``, both ``[rows, 1]``."""

    points: mx.array
    temperatures: mx.array
    filters: list[_Filter]

    @property
    def given(self) -> mx.array:
        """What ``DrawKernel`` is given; top_k is 0 for rows that draw from more tokens."""
        filters = [
            [one.top_p_limit, float(one.top_k if one.is_of_few else 0), one.log_min_p]
            for one in self.filters
        ]
        return mx.concatenate([self.temperatures, mx.array(filters), self.points], axis=1)


def _draw_of_all(logits: mx.array, draw: _Draw) -> mx.array:
    """From the whole vocabulary, sorted if a row has a filter."""
    scaled = logits / draw.temperatures
    if all(one == _NO_FILTER or one.is_of_few for one in draw.filters):
        return _invert(scaled, draw.points)
    order = mx.argsort(-logits, axis=-1)
    ranked = mx.take_along_axis(logits, order, axis=-1)
    kept = _kept(ranked, mx.softmax(ranked, axis=-1), draw.filters)
    # Back in the vocabulary's order: a row's token must not depend on its neighbours' filters.
    kept = mx.put_along_axis(mx.zeros_like(kept), order, kept, axis=-1)
    return _invert(mx.where(kept, scaled, -math.inf), draw.points)


def _draw_of_few(logits: mx.array, draw: _Draw) -> mx.array:
    """For rows with a small ``top_k``; the tokens of other rows are not used.

    The tokens that a filter leaves come first, in the vocabulary's order: as ``_draw_of_all`` has
    them, with nothing in between.
    """
    most = max(one.top_k for one in draw.filters if one.is_of_few)
    count = min(-(-most // FEW_STEP) * FEW_STEP, logits.shape[-1])
    tokens, ranked = largest(logits, count)
    probabilities = mx.exp(ranked - mx.logsumexp(logits, axis=-1, keepdims=True))
    kept = _kept(ranked, probabilities, draw.filters)
    order = mx.argsort(mx.where(kept, tokens.astype(mx.int32), logits.shape[-1]), axis=-1)
    scaled = mx.where(kept, ranked / draw.temperatures, -math.inf)
    place = _invert(mx.take_along_axis(scaled, order, axis=-1), draw.points)
    tokens = mx.take_along_axis(tokens, order, axis=-1)
    return mx.take_along_axis(tokens, place.reshape(-1, 1), axis=-1).reshape(-1)


class FewTokens:
    """Draws for rows with a small ``top_k``: with a kernel that is right, else with MLX.

    The first draw is made in both ways. A kernel that fails or gives other tokens is not used
    again.
    """

    def __init__(
        self, kernel: DrawKernel | None, before_computing: Callable[[], None] = lambda: None
    ) -> None:
        self._kernel = kernel
        self._before_computing = before_computing
        self._is_checked = False

    def draw(self, logits: mx.array, draw: _Draw) -> mx.array:
        """As ``_draw_of_few``."""
        if self._kernel is None:
            return _draw_of_few(logits, draw)
        if not self._is_checked:
            return self._first(self._kernel, logits, draw)
        return self._kernel(logits, draw.given)

    def _first(self, kernel: DrawKernel, logits: mx.array, draw: _Draw) -> mx.array:
        self._before_computing()
        self._is_checked = True
        wanted = _draw_of_few(logits, draw)
        are_others = mx.array([not one.is_of_few for one in draw.filters])
        try:
            found = kernel(logits, draw.given)
            is_equal = mx.all((found == wanted) | are_others).item()
            reason = "it gives other tokens"
        except RuntimeError as fault:
            is_equal, reason = False, str(fault)
        if not is_equal:
            log.warning("tokens are drawn without their kernel: %s", reason)
            self._kernel = None
        return wanted


def _kept(ranked: mx.array, probabilities: mx.array, filters: list[_Filter]) -> mx.array:
    """Which of the likeliest tokens, in falling order, the filters leave; the first always."""
    count = ranked.shape[-1]
    top_p = mx.array([[one.top_p_limit] for one in filters])
    top_k = mx.array([[one.top_k or count] for one in filters])
    min_p = mx.array([[one.log_min_p] for one in filters])
    above = mx.cumsum(probabilities, axis=-1) - probabilities
    rank = mx.arange(count)
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
    return Sampled(tokens, chosen, *largest(logprobs, min(count, logits.shape[-1])))
