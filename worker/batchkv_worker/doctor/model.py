"""The checks of one model on this device: files, memory, attention, a stored prefix, speed."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from batchkv_producer.doctor.contract import Verdict, fail, ok
from batchkv_producer.submit import fingerprint
from batchkv_worker.doctor.capacity import dtype_verdict, memory_verdict, speed_verdict
from batchkv_worker.doctor.examined import Examined
from batchkv_worker.doctor.tiers import steps as tier_steps
from batchkv_worker.kv.backends import blas
from batchkv_worker.settings import WorkerSettings

STORE_BYTES = "2GB"
# Variables of a worker that must not reach the engine of a check.
_OTHER_SETTINGS = ("BATCHKV_CACHE", "BATCHKV_TRACE", "BATCHKV_KV_ADOPT_FLOAT", "BATCHKV_MODEL")

Step = tuple[str, Callable[[], Verdict | None]]


def steps(request: Mapping[str, Any]) -> Iterator[Step]:
    """All checks, then those of the tiers, against this model's own speed."""
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="batchkv-doctor-") as folder:
        scheme = str(request.get("scheme") or "")
        examined = Examined(str(request["model"]), scheme, Path(folder))
        yield from own_steps(examined)
    if request.get("cache"):
        yield from tier_steps(request, examined.break_even)


def own_steps(examined: Examined) -> Iterator[Step]:
    """Files, loading, and what can be checked once it is loaded."""
    yield "model files", partial(files_verdict, examined.name)
    if not fingerprint.of_model(examined.name):
        return
    yield "model", partial(load_verdict, examined)
    if examined.engine is None:
        return
    try:
        yield from loaded_steps(examined)
    finally:
        examined.engine.close()


def loaded_steps(examined: Examined) -> Iterator[Step]:
    """The checks of a model that is loaded."""
    from batchkv_worker.doctor import attention, hit_miss

    engine = examined.loaded_engine
    yield "model's memory", partial(memory_verdict, examined)
    yield "dtype", partial(dtype_verdict, examined)
    for scheme in dict.fromkeys((engine.config.scheme, *attention.SCHEMES)):
        yield f"KV {scheme}", partial(attention.scheme_verdict, engine, scheme)
    yield "shared prefix", partial(attention.prefix_verdict, engine)
    yield "best tokens", partial(attention.best_tokens_verdict, engine)
    yield "stored prefix", partial(hit_miss.verdict, engine, examined.folder)
    yield "prompt speed", partial(speed_verdict, examined)


def files_verdict(name: str) -> Verdict:
    """The model is here, with weights and configuration, and its files have a fingerprint."""
    folder = fingerprint.locate(name)
    if folder is None:
        return fail(
            f"the model {name} is not on this machine",
            f'`batchkv ask -m {name} "Hello"` downloads it, if Hugging Face has it',
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

    settings = settings_of(examined)
    blas.load()  # before MLX, which reading the facts imports
    from batchkv_worker.kv.start.kv_memory import read_facts

    began = time.monotonic()
    if settings.memory_bytes is None:
        examined.facts = read_facts(None)
    examined.engine = build_engine(settings)
    examined.seconds = time.monotonic() - began
    loaded = examined.engine.loaded
    dtype = str(loaded.dtype).rpartition(".")[2]
    return ok(
        f"{loaded.weight_bytes / 1e9:,.2f} GB of weights in {dtype}, context {loaded.context:,}, "
        f"ready after {examined.seconds:.1f} s"
    )
