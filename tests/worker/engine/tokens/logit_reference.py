"""What the fields of a row do to its logits: one row, in plain numpy, as vLLM defines them."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from batchkv_worker.sequence import Generation


def expected_logits(
    logits: NDArray[np.float32], prompt: list[int], output: list[int], asked: Generation
) -> NDArray[np.float64]:
    """``logits`` ``[vocabulary]`` for the token after ``output``; -inf where it may not come."""
    found = logits.astype(np.float64)
    for *beginning, last in asked.bad_words:
        if not beginning or output[-len(beginning) :] == beginning:
            found[last] = -np.inf
    if len(output) < asked.min_tokens:
        found[[*asked.late_tokens]] = -np.inf
    for token, amount in asked.logit_bias:
        found[token] += amount
    for token in {*prompt, *output}:
        penalty = asked.repetition_penalty
        found[token] *= penalty if found[token] < 0 else 1 / penalty
    for token, count in Counter(output).items():
        found[token] -= asked.frequency_penalty * count + asked.presence_penalty
    return found
