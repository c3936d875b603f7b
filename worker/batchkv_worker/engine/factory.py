"""Builds an engine from a worker's settings, on the engine's thread.

MLX is imported only after ``blas.load``: another BLAS can only be chosen before that.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from batchkv_worker.engine import open_files
from batchkv_worker.kv.backends import blas
from batchkv_worker.model import load_progress as loading
from batchkv_worker.trace import ENGINE, LOAD, MEASURE

if TYPE_CHECKING:
    from batchkv_worker.engine.engine import Engine
    from batchkv_worker.settings import WorkerSettings

log = logging.getLogger("batchkv.engine")


def build_engine(settings: WorkerSettings, *, measures_anew: bool = False) -> Engine:
    """Load the settings' model and make its engine; raises ModelError.

    ``measures_anew``: the stored results of earlier starts are not used, but replaced.
    """
    log.info(blas_name := blas.load())
    open_files.import_mlx_lm()
    from batchkv_worker.engine.engine import Engine, EngineConfig
    from batchkv_worker.engine.kept_measurements import open_backend, warn_if_busy
    from batchkv_worker.engine.pressure import watch
    from batchkv_worker.kv.backends.default_slots import slots_of_this_machine
    from batchkv_worker.kv.backends.device import prepare_device
    from batchkv_worker.kv.start.kv_memory import choose_memory, read_facts
    from batchkv_worker.model.loader import load
    from batchkv_worker.prefix.shared.access import open_access

    access = open_access(settings)  # first: a fault in the settings costs no loading
    prepare_device(wired_limit=settings.wired_limit)
    facts = read_facts(settings.cache)  # before the model takes its own
    ENGINE.enter(LOAD)
    loaded = load(settings.model, settings.dtype, is_careful=True)
    slots = slots_of_this_machine() if settings.slots is None else settings.slots
    if settings.slots is None:
        log.info("%d rows decode at once on this device; --slots sets another number", slots)
    scheme = settings.kv_scheme
    backend = open_backend(loaded, scheme, slots, blas_name, is_anew=measures_anew)
    memory_bytes = choose_memory(
        *(settings.model, facts, loaded.weight_bytes, loaded.caches, scheme),
        *(loaded.dtype, settings.memory_bytes),
    )
    config = EngineConfig(
        scheme=scheme,
        slots=slots,
        prefetch=settings.rows_ahead(slots),
        chunk_tokens=settings.prefill_chunk,
        memory_bytes=memory_bytes,
        backend=backend,
        admission=settings.admission,
        audit=settings.cache_audit,
    )
    loading.report("measuring the fastest settings")
    ENGINE.enter(MEASURE)
    engine = Engine(loaded, config, access, watch(facts.kind))
    warn_if_busy(backend.measurements, settings.model)
    log.info(
        "model %s: %s, %s, context %d, %.1f MB of weights; KV %s: %d bytes a token, "
        "up to %.1f MB in %d slots",
        *(settings.model, loaded.caches, loaded.dtype, loaded.context),
        *(loaded.weight_bytes / 1e6, config.scheme, engine.bytes_per_token),
        *(config.memory_bytes / 1e6, config.slots),
    )
    return engine
