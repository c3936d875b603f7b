"""How many tokens of a prompt to compute at once: measured at start, on the device that serves.

Larger chunks use a device better up to a point; rows that decode wait for one chunk at most, so the
smallest that is nearly as fast as the fastest is taken. It changes no token.
"""

from __future__ import annotations

import logging
import time

import mlx.core as mx

from batchkv_worker.kv.layer import Chunk
from batchkv_worker.kv.plan import KvPlan
from batchkv_worker.kv.rows import PrefillRows
from batchkv_worker.model import LoadedModel

log = logging.getLogger("batchkv.engine")

SIZES = (256, 512, 1024, 2048)
ON_CPU = 512  # where sizes make little difference and measuring takes long
SECONDS = 1.5  # in all; a size that would not fit in is not tried
NEARLY = 0.95  # of the best speed


def choose_chunk(loaded: LoadedModel, plan: KvPlan) -> int:
    """Tokens a chunk for this model on this device."""
    if mx.default_device() == mx.Device(mx.cpu):
        return ON_CPU
    chosen = smallest_fast(measure(loaded, plan, SECONDS))
    mx.clear_cache()
    return chosen


def measure(loaded: LoadedModel, plan: KvPlan, seconds: float) -> dict[int, float]:
    """Tokens a second by size, of as many sizes as ``seconds`` allow; the first always."""
    speeds: dict[int, float] = {}
    until = time.perf_counter() + seconds
    for size in SIZES:
        if size >= loaded.context:
            break
        begun = time.perf_counter()
        _compute(loaded, plan, size)  # compiles
        again = time.perf_counter()
        _compute(loaded, plan, size)
        ended = time.perf_counter()
        speeds[size] = size / (ended - again)
        if ended + 2 * (ended - begun) > until:  # what twice the size takes
            break
    return speeds


def smallest_fast(speeds: dict[int, float]) -> int:
    """The smallest size that is nearly as fast as the fastest; without any, what a CPU gets."""
    best = max(speeds.values(), default=0.0)
    chosen = min((size for size in speeds if speeds[size] >= NEARLY * best), default=ON_CPU)
    told = ", ".join(f"{size}: {speed:.0f}" for size, speed in speeds.items())
    log.info("prompts are computed in chunks of %d tokens (tokens a second: %s)", chosen, told)
    return chosen


def _compute(loaded: LoadedModel, plan: KvPlan, size: int) -> None:
    rows = PrefillRows(plan.kinds, size, size)
    rows.begin(Chunk(0, size))
    tokens = mx.arange(size)[None] % min(loaded.vocabulary, size)
    loaded.model(tokens, cache=plan.tree.nested(rows.layers))
    rows.end()
    mx.eval(rows.arrays)
