"""Masks of guides, and several guides of one row."""

from __future__ import annotations

import random
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest

from batchkv_worker.engine.tokens.guide import (
    AllOf,
    Guide,
    Mask,
    allow_only,
    forbid,
    masked,
    new_masks,
)


class Without:
    """Forbids some tokens, and records what it takes."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = tokens
        self.taken: list[int] = []
        self.is_over = False

    def fill(self, allowed: Mask) -> None:
        forbid(allowed, self.tokens)

    def take(self, token: int) -> None:
        self.taken.append(token)

    def restart(self, tokens: Sequence[int]) -> None:
        self.taken = list(tokens)

    def fresh(self) -> Guide:
        return Without(*self.tokens)

    def and_then(self, grammar: Guide) -> Guide:
        return AllOf([self, grammar])


@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 100])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_mask_removes_exactly_its_tokens(vocabulary: int, dtype: mx.Dtype) -> None:
    """A forbidden token's logit becomes -inf, every other stays as it is, in each row."""
    rng = random.Random(vocabulary)
    masks = new_masks(3, vocabulary)
    forbidden = [[], [0], sorted({rng.randrange(vocabulary) for _ in range(40)})]
    for row, tokens in zip(masks, forbidden, strict=True):
        forbid(row, tokens)
    logits = mx.array([[rng.random() for _ in range(vocabulary)] for _ in range(3)]).astype(dtype)
    found = masked(logits, masks)
    assert found.dtype == dtype
    for before, after, tokens in zip(logits.tolist(), found.tolist(), forbidden, strict=True):
        assert after == [
            float("-inf") if token in tokens else value for token, value in enumerate(before)
        ]


def test_only_some_tokens_stay_of_those_allowed() -> None:
    """``allow_only`` never allows a token that was forbidden before."""
    (mask,) = new_masks(1, 70)
    forbid(mask, [3, 64])
    allow_only(mask, [3, 5, 31, 32, 64, 69])
    assert [t for t in range(96) if mask[t // 32] >> np.uint32(t % 32) & 1] == [5, 31, 32, 69]


def test_several_guides_are_one() -> None:
    """All of them take each token, and a token must be allowed by each."""
    first, second = Without(1), Without(2)
    both = AllOf([first, second])
    (mask,) = new_masks(1, 8)
    both.fill(mask)
    assert mask[0] == 0xFFFFFFFF - 2 - 4
    both.take(7)
    assert (first.taken, second.taken) == ([7], [7])
    copy = both.fresh()
    both.restart([4, 5])
    assert (first.taken, second.taken) == ([4, 5], [4, 5])
    assert isinstance(copy, AllOf)
    assert [guide.taken for guide in copy.guides if isinstance(guide, Without)] == [[], []]
    assert not both.is_over
    second.is_over = True
    assert both.is_over


def test_the_first_guide_decides_where_a_grammar_begins() -> None:
    """A grammar that is added later goes to the first of several guides."""
    grammar = Without(9)
    found = AllOf([Without(1), Without(2)]).and_then(grammar)
    assert isinstance(found, AllOf) and isinstance(found.guides[0], AllOf)
    assert found.guides[0].guides[1] is grammar
