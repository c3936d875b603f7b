"""Attention over packed keys and values, and the choice of the likeliest tokens, of one model."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from batchkv_producer.doctor.contract import Verdict
from batchkv_worker.doctor.arithmetic import Compared
from batchkv_worker.doctor.device import judge_compared

if TYPE_CHECKING:
    from batchkv_worker.engine.engine import Engine

COUNTS = (1, 20, 64)


def best_tokens_verdict(engine: Engine) -> Verdict:
    """The likeliest few of this model's vocabulary, with many equal numbers among them."""
    return judge_compared(compare_largest(engine.loaded.vocabulary))


def compare_largest(vocabulary: int) -> list[Compared]:
    """Of equal numbers the first is the larger, as in a stable sort."""
    import mlx.core as mx

    from batchkv_worker.engine.tokens.largest import largest

    rng = random.Random(17)
    rows = [[rng.randint(-200, 200) / 8 for _ in range(vocabulary)] for _ in range(2)]
    array = mx.array(rows)
    found = []
    for count in (count for count in COUNTS if count <= vocabulary):
        places, values = largest(array, count)
        for row, own, picked in zip(rows, places.tolist(), values.tolist(), strict=True):
            order = sorted(range(vocabulary), key=lambda place: -row[place])[:count]
            wrong = sum(a != b for a, b in zip(own, order, strict=True)) / count
            right = [row[place] for place in order]
            wrong = max(wrong, sum(a != b for a, b in zip(picked, right, strict=True)) / count)
            found.append(Compared(f"best {count} of {vocabulary:,}", wrong, 0.0))
    return found
