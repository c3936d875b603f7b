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

__all__ = ["AllOf", "Guide", "GuideFault", "Mask", "allow_only", "forbid", "masked", "new_masks"]

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


def masked(logits: mx.array, masks: NDArray[np.uint32]) -> mx.array:
    """``logits`` ``[rows, vocabulary]``, and -inf where a row's mask forbids the token."""
    # By bytes, since arrays of words would be four times as large. Every host is little-endian.
    groups = mx.array(masks.view(np.uint8))
    bits = mx.array([1 << place for place in range(8)], mx.uint8)
    is_allowed = (groups[:, :, None] & bits) != 0
    is_allowed = is_allowed.reshape(masks.shape[0], -1)[:, : logits.shape[-1]]
    return mx.where(is_allowed, logits, mx.array(float("-inf"), logits.dtype))
