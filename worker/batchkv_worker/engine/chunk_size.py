"""Chooses how many prompt tokens a chunk has, by measuring at start on the device that serves.

Larger chunks are faster up to a point, but rows that decode wait for a chunk or two. So the
smallest size that is nearly as fast as the fastest is chosen. No token depends on it. What is
measured is computing alone, so the time that an engine takes for each chunk besides is added.

The first time that a size is computed, a GPU compiles kernels for it. That may take seconds where
the size itself takes a twentieth of one. It is not counted as speed; ``START_SECONDS`` bounds it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import mlx.core as mx

from batchkv_worker.faults import is_device_fault, is_out_of_memory
from batchkv_worker.kv.backends import device
from batchkv_worker.kv.backends.launching import AT_ONCE, Launches
from batchkv_worker.kv.backends.measurements import Codec
from batchkv_worker.kv.layers.contract import Chunk
from batchkv_worker.kv.layers.prefill_rows import PrefillRows
from batchkv_worker.kv.start.machine import memory_bytes
from batchkv_worker.kv.start.plan import KvPlan
from batchkv_worker.model.loader import LoadedModel

Result = TypeVar("Result")
log = logging.getLogger("batchkv.engine")

SIZES = (256, 512, 1024, 2048, 4096)  # up to the backend's ``largest_chunk``
SECONDS = 4.0  # for compiled kernels; a size that would take longer is not tried
START_SECONDS = 30.0  # in all, with the first computation of each size
TURNS = 3  # for each size; the least time counts
CHUNKS = "sizes of chunks"  # the name of the stored result
NEARLY = 0.95  # of the best speed
# A chunk reads the weights of all experts that any of its tokens uses: nearly all of them from 256
# tokens on. So each doubling of a chunk halves what is read for a token, up to sizes that there is
# no time to try.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
LEAST_OF_EXPERTS = 1024
LARGE_BYTES = 32 * 10**9  # of memory: the activations of a large chunk fit in it


@dataclass(frozen=True, slots=True)
class Measured:
    """Tokens a second by size; ``is_whole`` when every size that the model allows was tried."""

    speeds: dict[int, float] = field(default_factory=dict)
    is_whole: bool = False


def _measured_from_json(value: Any) -> Measured:
    if type(value["is_whole"]) is not bool:
        raise TypeError(f"{value['is_whole']!r} is neither true nor false")
    speeds = {int(size): float(speed) for size, speed in value["tokens_per_second"].items()}
    if not speeds.keys() <= {*SIZES}:
        raise ValueError(f"no sizes are tried like {sorted(speeds)}")
    return Measured(speeds, value["is_whole"])


MEASURED: Codec[Measured] = Codec(
    lambda found: {
        "tokens_per_second": {str(size): speed for size, speed in found.speeds.items()},
        "is_whole": found.is_whole,
    },
    _measured_from_json,
)


def choose_chunk(
    loaded: LoadedModel,
    plan: KvPlan,
    observe: Callable[[int, float], object],
    launches: Launches = AT_ONCE,
) -> int:
    """Tokens a chunk for this model on this device, whose layers ``launches`` starts.

    A fault closes ``launches``, for there will be no engine. ``observe`` gets the tokens and the
    seconds of such a chunk, if any was timed.
    """
    backend = plan.backend
    if not backend.measures_chunk:
        return backend.usual_chunk
    try:
        found = backend.measurements.of(
            CHUNKS, lambda: measure(loaded, plan, SECONDS, START_SECONDS, launches), MEASURED
        )
    except BaseException:
        launches.close()
        raise
    mx.clear_cache()
    least = least_chunk(loaded.config, memory_bytes())
    chosen = smallest_fast(found, backend.usual_chunk, least, backend.chunk_seconds)
    if found.speeds:
        size = min(found.speeds, key=lambda size: abs(size - chosen))
        observe(size, size / found.speeds[size])
    return chosen


def measure(
    loaded: LoadedModel,
    plan: KvPlan,
    seconds: float,
    start_seconds: float = START_SECONDS,
    launches: Launches = AT_ONCE,
) -> Measured:
    """The speeds of as many sizes as the two limits allow; that of the first always.

    macOS may end long work of the GPU. A size at which the device fails twice, or memory runs out,
    is too large for this machine, and so are all larger ones: the start goes on with smaller ones.
    """
    sizes = [size for size in SIZES if size < loaded.context]
    sizes = [size for size in sizes if size <= plan.backend.largest_chunk]
    end = time.perf_counter() + start_seconds
    least: dict[int, float] = {}  # seconds
    spent = 0.0
    for size in sizes:
        if least and spent + 2 * least[max(least)] > seconds:
            break
        try:
            _twice_at_most(_compute, loaded, plan, size, launches)  # compiles
            if least and time.perf_counter() > end:
                break
            least[size] = _twice_at_most(_time, loaded, plan, size, launches)
        except (RuntimeError, MemoryError) as fault:
            if not (least and _is_too_large(fault)):
                raise
            log.warning("chunks of %d tokens and more are not used: %s", size, fault)
            return Measured({size: size / took for size, took in least.items()}, is_whole=True)
        spent += least[size]
    is_whole = len(least) == len(sizes)
    for _ in range(TURNS - 1):  # all again in turns: a GPU that wakes up is slow at first
        for size in least:
            if spent + least[size] > seconds or time.perf_counter() > end:
                break
            again = _twice_at_most(_time, loaded, plan, size, launches)
            spent += again
            least[size] = min(least[size], again)
    return Measured({size: size / took for size, took in least.items()}, is_whole)


def _is_too_large(fault: Exception) -> bool:
    """Whether a smaller chunk may do what this one failed to do."""
    return is_out_of_memory(fault) or (is_device_fault(fault) and device.drain())


def least_chunk(config: Mapping[str, Any], memory: int) -> int:
    """What a chunk has where there was no time to try large ones; 0 for no such limit.

    ``config`` is the model's; ``memory`` are bytes of the device.
    """
    parts = [config, *(part for part in config.values() if isinstance(part, Mapping))]
    counts = [part.get(name) for part in parts for name in EXPERTS]
    has_experts = any(type(count) is int and count > 1 for count in counts)
    return LEAST_OF_EXPERTS if has_experts and memory >= LARGE_BYTES else 0


def smallest_fast(found: Measured, usual: int, least: int = 0, each: float = 0.0) -> int:
    """The smallest size that is nearly as fast as the fastest, with ``each`` seconds more a chunk.

    If time was too short to try all sizes, it is not less than ``least``. If the largest size that
    was tried is also the fastest, it is not less than ``usual`` either.
    """
    speeds = {size: size / (size / speed + each) for size, speed in found.speeds.items()}
    best = max(speeds.values(), default=0.0)
    chosen = min((size for size in speeds if speeds[size] >= NEARLY * best), default=usual)
    is_rising = not found.is_whole and chosen == max(speeds, default=usual)
    if is_rising:
        chosen = max(chosen, usual)
    if not found.is_whole:
        chosen = max(chosen, least)
    measured = ", ".join(f"{size}: {speed:.0f}" for size, speed in found.speeds.items())
    short = "; time was short for larger ones" if is_rising else ""
    log.info("prompts are computed in chunks of %d tokens (tokens a second: %s%s)",
             chosen, measured or "not measured", short)  # fmt: skip
    return chosen


def _twice_at_most(compute: Callable[..., Result], *what: Any) -> Result:
    """Compute once more if the device fails: another program's work may have been the reason."""
    try:
        return compute(*what)
    except RuntimeError as fault:
        if not (is_device_fault(fault) and device.drain()):
            raise
        return compute(*what)


def _time(loaded: LoadedModel, plan: KvPlan, size: int, launches: Launches) -> float:
    begun = time.perf_counter()
    _compute(loaded, plan, size, launches)
    return max(time.perf_counter() - begun, 1e-9)


def _compute(loaded: LoadedModel, plan: KvPlan, size: int, launches: Launches) -> None:
    rows = PrefillRows(plan.backend, plan.kinds, size, size, launches)
    rows.begin(Chunk(0, size))
    tokens = mx.arange(size)[None] % min(loaded.vocabulary, size)
    try:
        loaded.model(tokens, cache=plan.tree.nested(rows.layers))
        rows.end()
        rows.start()
    except BaseException:
        launches.settle()
        raise
    mx.eval(rows.arrays)
