"""Guides of a row as one, and their bit masks on host and device.

``batchkv_worker.guide`` has the contract. A mask is one row of words of 32 tokens. The lowest bit
of the first word is token 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from batchkv_worker.guide import Guide, GuideFault

__all__ = [
    "AllOf",
    "Guide",
    "GuideFault",
    "Mask",
    "allow_only",
    "doubted_of",
    "forbid",
    "has_bit",
    "masked",
    "new_masks",
    "without_doubted",
]

Mask = NDArray[np.uint32]

WORD_BITS = 32
_ALL = np.uint32(0xFFFFFFFF)


class AllOf:
    """Several guides of one row: a token must be allowed by each."""

    def __init__(self, guides: Iterable[Guide]) -> None:
        self.guides = tuple(guides)

    @property
    def is_over(self) -> bool:
        return any(guide.is_over for guide in self.guides)

    def fill(self, allowed: Mask) -> None:
        for guide in self.guides:
            guide.fill(allowed)

    def take(self, token: int) -> None:
        for guide in self.guides:
            guide.take(token)

    def restart(self, tokens: Sequence[int]) -> None:
        for guide in self.guides:
            guide.restart(tokens)

    def fresh(self) -> Guide:
        return AllOf(guide.fresh() for guide in self.guides)

    def and_then(self, grammar: Guide) -> Guide:
        """The first guide decides where the grammar begins."""
        first, *others = self.guides
        return AllOf([first.and_then(grammar), *others])


def new_masks(num_rows: int, vocabulary: int) -> NDArray[np.uint32]:
    """Masks ``[rows, words]`` that allow every token."""
    return np.full((num_rows, -(-vocabulary // WORD_BITS)), _ALL, np.uint32)


def forbid(allowed: Mask, tokens: Iterable[int]) -> None:
    """Clear the bits of some tokens."""
    for token in tokens:
        allowed[token // WORD_BITS] &= ~np.uint32(1 << token % WORD_BITS)


def allow_only(allowed: Mask, tokens: Iterable[int]) -> None:
    """Clear the bits of all other tokens. Of these tokens, those stay allowed that were."""
    only = np.zeros_like(allowed)
    for token in tokens:
        only[token // WORD_BITS] |= np.uint32(1 << token % WORD_BITS)
    allowed &= only


def has_bit(allowed: Mask, token: int) -> bool:
    """Whether a mask allows a token."""
    return bool(allowed[token // WORD_BITS] >> np.uint32(token % WORD_BITS) & np.uint32(1))


def doubted_of(guide: Guide | None, allowed: Mask) -> tuple[int, ...]:
    """A token that the mask allows, but only where the likeliest of all tokens is one of these.

    The token is the first of them. Empty for most guides and masks: none is doubted. A token that
    is the only one allowed is never doubted.
    """
    if isinstance(guide, AllOf):
        return next(filter(None, (doubted_of(one, allowed) for one in guide.guides)), ())
    found: tuple[int, ...] = getattr(guide, "doubted", ())
    if not found:
        return ()
    others = allowed.copy()
    forbid(others, found[:1])
    return found if others.any() else ()


def without_doubted(
    logits: mx.array, of_model: mx.array, doubted: Sequence[tuple[int, ...]]
) -> mx.array:
    """``logits`` ``[rows, vocabulary]``, and -inf for doubted tokens that have no reason to come.

    ``of_model`` are the logits without masks, ``doubted`` what ``doubted_of`` gave for each row.
    """
    if not any(doubted):
        return logits
    longest = max(map(len, doubted))
    reasons = mx.array([[*one, *[-1] * (longest - len(one))] for one in doubted])
    likeliest = mx.argmax(of_model, axis=-1, keepdims=True).astype(reasons.dtype)
    has_reason = (reasons == likeliest).any(axis=-1, keepdims=True)
    is_doubted = mx.arange(logits.shape[-1], dtype=reasons.dtype) == reasons[:, :1]
    return mx.where(is_doubted & ~has_reason, mx.array(float("-inf"), logits.dtype), logits)


def masked(logits: mx.array, masks: NDArray[np.uint32]) -> mx.array:
    """``logits`` ``[rows, vocabulary]``, and -inf where a row's mask forbids the token."""
    # By bytes, since arrays of words would be four times as large. Every host is little-endian.
    groups = mx.array(masks.view(np.uint8))
    bits = mx.array([1 << place for place in range(8)], mx.uint8)
    is_allowed = (groups[:, :, None] & bits) != 0
    is_allowed = is_allowed.reshape(masks.shape[0], -1)[:, : logits.shape[-1]]
    return mx.where(is_allowed, logits, mx.array(float("-inf"), logits.dtype))
