"""Hundreds of steps with rows coming and going: arrays and memory stay as they are.

The whole length, 10,000 steps, runs when ``BATCHKV_SOAK`` is ``all``.
"""

from __future__ import annotations

import gc
import os
import random
from dataclasses import dataclass

import mlx.core as mx
import pytest

from worker.kv.crowd import Crowd

STEPS = 10_000 if os.environ.get("BATCHKV_SOAK", "") == "all" else 500
SAMPLE = STEPS // 10


@dataclass(frozen=True, slots=True)
class Usage:
    """What is alive now: arrays that Python knows, and bytes that MLX has."""

    arrays: int
    num_bytes: int

    @classmethod
    def now(cls) -> Usage:
        gc.collect()
        mx.synchronize()
        arrays = sum(isinstance(thing, mx.array) for thing in gc.get_objects())
        return cls(arrays, mx.get_active_memory())


def _refill(crowd: Crowd, rng: random.Random, prefixes: list[list[int]], index: int) -> None:
    """A row now and then: short ones, long ones, some behind a shared prefix, some cancelled."""
    start = rng.choice(prefixes) if rng.random() < 0.2 else []
    tail = [rng.randrange(1, 500) for _ in range(rng.choice([1, 3, 20, 60]))]
    crowd.add(str(index), [*start, *tail], count=rng.choice([1, 5, 20, 50]))
    if rng.random() < 0.1:
        crowd.engine.cancel(str(index - rng.randrange(8)))


@pytest.mark.timeout(60 + STEPS // 5)
def test_arrays_and_memory_are_flat() -> None:
    """H9, W8, G1, G2: sliding, recurrent and full layers; buffers and prefixes are as large as
    ever, and not one array is left behind by a row.
    """
    crowd = Crowd("gear", slots=4, scheme="affine8", prefix_bytes=2**19, group_cost=1)
    rng = random.Random(9)
    prefixes = [[rng.randrange(1, 500) for _ in range(280)] for _ in range(12)]
    for number, prefix in enumerate(prefixes):  # the memory for prefixes is full from the start
        crowd.add(f"first {number}", [*prefix, 1], count=1)
    crowd.drain()
    seen: list[Usage] = []
    steps = index = 0
    while steps < STEPS:
        if crowd.engine._scheduler.num_waiting < 2:
            _refill(crowd, rng, prefixes, index)
            index += 1
        crowd.step()
        crowd.ended.clear()
        crowd.prompts.clear()
        steps += 1
        if steps % SAMPLE == 0:
            seen.append(Usage.now())
    warm, later = seen[:4], seen[4:]
    assert index > STEPS // 20
    # Which prefixes are held, and how many rows are in flight, differs from sample to sample.
    assert max(u.arrays for u in later) <= max(u.arrays for u in warm) + 40, seen
    assert max(u.num_bytes for u in later) <= max(u.num_bytes for u in warm) * 1.1 + 2**16, seen
    crowd.drain()
    crowd.engine.close()
