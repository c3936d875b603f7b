"""The tiny models are fit to compare with: what they read and where they stand changes tokens."""

from __future__ import annotations

import random

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from parity.families import VOCABULARY
from parity.harness import CHUNK, random_prompt
from parity.matrix import CLOSE_FLOAT
from support import tiny_models


@pytest.mark.few(10)
@pytest.mark.parametrize("family", tiny_models.ALL_FAMILIES)
def test_families_are_alive(family: str) -> None:
    """Greedy tokens vary, chunks change none, and an early token is heard 58 tokens later."""
    model = tiny_models.build(family)
    prompt = random_prompt(random.Random(0), 60)
    steps = tiny_models.alone_with_margins(model, prompt, 16)
    assert len({step.token for step in steps}) >= 6
    chunked = tiny_models.alone_with_margins(model, prompt, 16, chunk_tokens=CHUNK)
    for one, other in zip(steps, chunked, strict=True):
        if one.token != other.token:  # rounding may decide where two tokens are equally good
            assert one.margin <= CLOSE_FLOAT
            break
    swapped = [prompt[0], (prompt[1] + 99) % VOCABULARY, *prompt[2:]]
    logits, changed = (
        model(mx.array([tokens]), cache=make_prompt_cache(model))[0, -1]
        for tokens in (prompt, swapped)
    )
    assert mx.abs(logits - changed).max().item() > 0.05 * logits.std().item()
