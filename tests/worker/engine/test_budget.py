"""Measured allocations stay within the budget: buffers, their copies, prompts, shared prefixes."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import pytest

from batchkv_cache_store.keys import BLOCK_TOKENS
from batchkv_worker.engine.engine import Engine
from batchkv_worker.engine.prefill import Prefill
from batchkv_worker.engine.schedule.admission import FEWEST_OUTPUTS
from batchkv_worker.kv.layers.decode import DecodeSlots
from worker.kv.crowd import Crowd, random_prompt


class Meter:
    """The most bytes that were alive at once, beyond those before the engine took any row.

    Looked at after each chunk and each step, and as a peak while buffers are rebuilt and rows are
    copied in or out: only there nothing but keys and values is computed.
    """

    def __init__(self, running: Engine) -> None:
        gc.collect()  # what tests before have left is not to be freed meanwhile
        mx.synchronize()
        mx.clear_cache()
        self._before = mx.get_active_memory()
        self.most = 0

    def look(self, num_bytes: int | None = None) -> None:
        found = mx.get_active_memory() if num_bytes is None else num_bytes
        self.most = max(self.most, found - self._before)


@contextmanager
def metered(running: Engine) -> Iterator[Meter]:
    meter = Meter(running)

    def peak(call: Any) -> Any:
        def wrapped(*args: Any, **options: Any) -> Any:
            mx.synchronize()
            mx.reset_peak_memory()
            try:
                return call(*args, **options)
            finally:
                meter.look(mx.get_peak_memory())

        return wrapped

    def after(call: Any) -> Any:
        def wrapped(*args: Any, **options: Any) -> Any:
            found = call(*args, **options)
            mx.synchronize()
            meter.look()
            return found

        return wrapped

    with pytest.MonkeyPatch.context() as patch:
        for name in ("_relayout", "admit", "_move", "snapshot", "make_prefix"):
            patch.setattr(DecodeSlots, name, peak(getattr(DecodeSlots, name)))
        patch.setattr(Prefill, "advance", after(Prefill.advance))
        yield meter


LOADS = ("short rows in wide slots", "one long among short", "staggered", "many lengths")


def load(name: str, rng: random.Random) -> list[tuple[int, int]]:
    """(prompt tokens, answer tokens) of rows for which the layout changes often."""
    if name == "short rows in wide slots":
        return [(rng.randrange(2, 12), rng.randrange(1, 5)) for _ in range(20)]
    if name == "one long among short":
        return [(700, 60), *((10, rng.randrange(20, 40)) for _ in range(12))]
    if name == "staggered":
        return [(200 + index, 70 - index) for index in range(14)]
    return [(rng.choice([3, 60, 250, 257, 600]), rng.randrange(1, 60)) for _ in range(12)]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "scheme", "admission"),
    [
        ("llama", "turbo4", "worst"),
        ("llama", "affine8", "optimistic"),
        ("gear", "float", "optimistic"),
    ],
    ids=str,
)
def test_allocated_bytes_keep_to_the_budget(family: str, scheme: str, admission: str) -> None:
    """Peaks while buffers grow, shift and take rows in stay within the budget, for bad loads."""
    values = {"slots": 8, "scheme": scheme, "prefix_bytes": 0, "chunk_tokens": 256}
    costs = Crowd(family, **values).engine.plan.costs
    windows = sum(512 * size for size in costs.per_window.values())
    allowed = 8 * (costs.per_row + windows) + 3600 * (costs.per_token + costs.largest)
    crowd = Crowd(family, memory_bytes=allowed, admission=admission, **values)
    for _ in range(FEWEST_OUTPUTS):
        crowd.engine._scheduler.output_lengths.add(2)
    with metered(crowd.engine) as meter:
        for number, name in enumerate(LOADS):
            for index, (length, count) in enumerate(load(name, random.Random(number))):
                crowd.add(f"{name} {index}", random_prompt(index, length), count=count)
            crowd.drain()
            assert meter.most <= allowed, name
    assert meter.most > 0.6 * allowed  # else the budget was not reached


def test_rows_behind_a_prefix_are_in_where_copies_need_ten_times_the_bytes() -> None:
    """64 rows of 4,100 tokens with one shared prefix decode at once, in a tenth of the bytes."""
    costs = Crowd("llama", slots=64, scheme="affine8").engine.plan.costs
    prefix = random_prompt(1, 16 * BLOCK_TOKENS)
    copied = 64 * (len(prefix) + BLOCK_TOKENS) * costs.per_token
    prefix_bytes = 17 * BLOCK_TOKENS * costs.per_token
    crowd = Crowd(
        *("llama",), slots=64, scheme="affine8", chunk_tokens=2048,
        prefix_bytes=prefix_bytes, memory_bytes=prefix_bytes + copied // 8,
    )  # fmt: skip
    for index in range(64):
        crowd.add(str(index), [*prefix, *random_prompt(9 + index, 2)], count=12)
    most = num_bytes = 0
    while not crowd.engine.is_idle:
        crowd.step()
        layouts = crowd.engine._slots.layouts
        if layouts.num_active > most:
            held = {
                id(array): array.nbytes for s in layouts.prefixes.values() for array in s.arrays
            }
            most, num_bytes = layouts.num_active, crowd.engine.kv_bytes + sum(held.values())
    assert most == 64
    assert num_bytes * 10 <= copied
