"""What this device gives a model: memory for rows, the dtype that suits it, speed of prompts."""

from __future__ import annotations

import time

from batchkv_producer.doctor.contract import Verdict, fail, ok, warn
from batchkv_worker.doctor.device import device_info
from batchkv_worker.doctor.examined import Examined

GIB = 2**30
FEW_ROW_TOKENS = 512  # of memory for each slot; with less, rows leave their slots and come back
SPEED_SECONDS = 2.0


def memory_verdict(examined: Examined) -> Verdict:
    """Room for keys and values, beside the weights and what else uses this machine."""
    from batchkv_worker.kv.backends.memory_budget import ModelFacts, plan_memory
    from batchkv_worker.kv.start.kv_memory import dense_share

    engine, loaded, problem = examined.loaded_engine, examined.loaded_engine.loaded, ""
    if examined.facts is not None:
        share = dense_share(loaded.caches, engine.config.scheme, loaded.dtype)
        problem = plan_memory(examined.facts, ModelFacts(loaded.weight_bytes, share)).problem
    return judge_memory(
        *(engine.config.memory_bytes, engine.bytes_per_token, engine.config.slots, problem)
    )


def judge_memory(memory: int, per_token: int, slots: int, problem: str = "") -> Verdict:
    """How many tokens fit, in all and for each row that decodes at once."""
    tokens = memory // max(1, per_token)
    shown = (
        f"{memory / GIB:,.1f} GiB for keys and values hold {tokens:,} tokens, "
        f"{tokens // slots:,} for each of {slots} slots"
    )
    smaller = "use a smaller model, one of 4 bits, --kv-scheme affine4, or fewer --slots"
    if tokens < FEW_ROW_TOKENS:
        return fail(f"{shown}: hardly a row fits", smaller)
    if problem:
        found, _, todo = problem.rpartition(". ")
        return warn(f"{shown}. {found}", todo)
    if tokens < FEW_ROW_TOKENS * slots:
        return warn(shown, smaller)
    return ok(shown)


def dtype_verdict(examined: Examined) -> Verdict | None:
    """float16 against bfloat16, on chips that compute bfloat16 slowly."""
    import mlx.core as mx

    architecture = str(device_info().get("architecture", ""))
    if not is_slow_at_bfloat16(architecture) or examined.loaded_engine.loaded.dtype != mx.bfloat16:
        return None
    spent = {}
    for dtype in (mx.bfloat16, mx.float16):
        left = mx.random.normal((512, 2560)).astype(dtype)
        right = mx.random.normal((2560, 2560)).astype(dtype)
        mx.eval(left @ right)  # compiles
        least = float("inf")
        for _ in range(5):
            began = time.perf_counter()
            mx.eval(left @ right)
            least = min(least, time.perf_counter() - began)
        spent[dtype] = least
    return judge_dtype(spent[mx.bfloat16] / spent[mx.float16])


def is_slow_at_bfloat16(architecture: str) -> bool:
    """M1 and M2 have no arithmetic of bfloat16."""
    return architecture.startswith(("applegpu_g13", "applegpu_g14"))


def judge_dtype(gain: float) -> Verdict:
    """``gain``: how many times as fast a product is in float16."""
    if gain < 1.05:
        return ok(f"products in float16 are {gain:.2f} times as fast as in bfloat16 here")
    return ok(
        f"products in float16 are {gain:.2f} times as fast as in bfloat16 here",
        "`--dtype float16` is faster on this chip; all workers of a batch may mix both",
    )


def speed_verdict(examined: Examined) -> Verdict:
    """How fast prompts are computed, and from which speed on a stored prefix is faster."""
    from batchkv_worker.engine.chunk_size import measure

    engine = examined.loaded_engine
    found = measure(engine.loaded, engine.plan, SPEED_SECONDS)
    speed = max(found.speeds.values(), default=0.0)
    examined.break_even = pays = break_even(engine.bytes_per_token, speed)
    return ok(
        f"prompts are computed at {speed:,.0f} tokens/s; a stored prefix of "
        f"{engine.config.scheme} pays from {pays:,.1f} MB/s on"
    )


def break_even(bytes_per_token: int, tokens_per_second: float) -> float:
    """MB/s at which loading a token's keys and values takes as long as computing them."""
    return bytes_per_token * tokens_per_second / 1e6
