"""The checks of one model on this device: files, memory, attention, a stored prefix, speed."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchkv_producer.doctor.contract import Verdict, fail, ok, warn
from batchkv_producer.submit import fingerprint
from batchkv_worker.doctor.device import device_info
from batchkv_worker.doctor.tiers import steps as tier_steps
from batchkv_worker.settings import WorkerSettings

if TYPE_CHECKING:
    from batchkv_worker.engine.engine import Engine

GIB = 2**30
STORE_BYTES = "2GB"
FEW_ROW_TOKENS = 512  # of memory for each slot; with less, rows leave their slots and come back
SPEED_SECONDS = 2.0
# Variables of a worker that must not reach the engine of a check.
_OTHER_SETTINGS = ("BATCHKV_CACHE", "BATCHKV_TRACE", "BATCHKV_KV_ADOPT_FLOAT", "BATCHKV_MODEL")

Step = tuple[str, Callable[[], Verdict | None]]


@dataclass(slots=True)
class Examined:
    """The model that is examined, once it is loaded."""

    name: str
    scheme: str
    folder: Path  # for the store of prefixes
    engine: Engine | None = None
    seconds: float = 0.0
    break_even: float | None = None  # MB/s from which a stored prefix pays

    @property
    def loaded_engine(self) -> Engine:
        """The engine; there is one when this is asked for."""
        assert self.engine is not None
        return self.engine


def steps(request: Mapping[str, Any]) -> Iterator[Step]:
    """All checks, then those of the tiers, against this model's own speed."""
    logging.disable(logging.WARNING)
    name, scheme = str(request["model"]), str(request.get("scheme") or "")
    yield "model files", partial(files_verdict, name)
    if not fingerprint.of_model(name):
        return
    with tempfile.TemporaryDirectory(prefix="batchkv-doctor-") as folder:
        examined = Examined(name, scheme, Path(folder))
        yield "model", partial(load_verdict, examined)
        if examined.engine is None:
            return
        try:
            yield from loaded_steps(examined)
        finally:
            examined.engine.close()
    if request.get("cache"):
        yield from tier_steps(request, examined.break_even)


def loaded_steps(examined: Examined) -> Iterator[Step]:
    """The checks of a model that is loaded."""
    from batchkv_worker.doctor import attention, hit_miss

    engine = examined.loaded_engine
    yield "model's memory", partial(memory_verdict, examined)
    yield "dtype", partial(dtype_verdict, examined)
    yield "best tokens", partial(attention.best_tokens_verdict, engine)
    yield "stored prefix", partial(hit_miss.verdict, engine, examined.folder)
    yield "prompt speed", partial(speed_verdict, examined)


def files_verdict(name: str) -> Verdict:
    """The model is here, with weights and configuration, and its files have a fingerprint."""
    folder = fingerprint.locate(name)
    if folder is None:
        return fail(
            f"the model {name} is not on this machine",
            f'`batchkv ask -m {name} "Hello"` downloads it, if the hub has it',
        )
    found = fingerprint.of_folder(folder)
    if not found:
        return fail(
            f"files of the model {name} are missing: weights, or parts of a download",
            "download it again",
        )
    return ok(f"all files of {Path(name).name} are here (fingerprint {found[:8]})")


def settings_of(examined: Examined) -> WorkerSettings:
    """As a worker here would have them, with a store of its own. Raises SettingsError."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(_OTHER_SETTINGS)}
    return WorkerSettings.from_env(
        environ,
        model=examined.name,
        kv_scheme=examined.scheme or None,
        cache=f"disk:{examined.folder}/store?max={STORE_BYTES}",
        cache_write="all",
    )


def load_verdict(examined: Examined) -> Verdict:
    """It is loaded, and its engine is made as a worker makes it. BatchkvError says why not."""
    from batchkv_worker.engine.factory import build_engine

    began = time.monotonic()
    examined.engine = build_engine(settings_of(examined))
    examined.seconds = time.monotonic() - began
    loaded = examined.engine.loaded
    dtype = str(loaded.dtype).rpartition(".")[2]
    return ok(
        f"{loaded.weight_bytes / 1e9:,.2f} GB of weights in {dtype}, context {loaded.context:,}, "
        f"ready after {examined.seconds:.1f} s"
    )


def memory_verdict(examined: Examined) -> Verdict:
    """Room for keys and values, beside the weights."""
    engine = examined.loaded_engine
    return judge_memory(
        engine.config.memory_bytes,
        engine.bytes_per_token,
        engine.config.slots,
        engine.loaded.weight_bytes,
    )


def judge_memory(memory: int, per_token: int, slots: int, weights: int) -> Verdict:
    """How many tokens fit, in all and for each row that decodes at once."""
    tokens = memory // max(1, per_token)
    shown = (
        f"{memory / GIB:,.1f} GiB for keys and values hold {tokens:,} tokens, "
        f"{tokens // slots:,} for each of {slots} slots"
    )
    smaller = "use a smaller model, one of 4 bits, --kv-scheme affine4, or fewer --slots"
    if tokens < FEW_ROW_TOKENS:
        return fail(
            f"{shown}: hardly a row fits beside {weights / GIB:,.1f} GiB of weights", smaller
        )
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
