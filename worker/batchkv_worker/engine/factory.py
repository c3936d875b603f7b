"""Builds an engine from a worker's settings, on the engine's thread.

MLX is imported only after ``blas.load``: another BLAS can only be chosen before that.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from batchkv_worker.engine import open_files
from batchkv_worker.kv.backends import blas
from batchkv_worker.model import load_progress as loading
from batchkv_worker.trace import ENGINE, LOAD, MEASURE

if TYPE_CHECKING:
    import mlx.core as mx

    from batchkv_worker.engine.engine import Engine
    from batchkv_worker.events import EngineLike
    from batchkv_worker.model.adapter_files import AdapterFiles
    from batchkv_worker.model.adapters import LoadedAdapter
    from batchkv_worker.model.loader import LoadedModel
    from batchkv_worker.settings import WorkerSettings

log = logging.getLogger("batchkv.engine")


def build_engine(settings: WorkerSettings, *, measures_anew: bool = False) -> Engine:
    """Load the settings' model and make its engine, without adapters; raises ModelError.

    ``measures_anew``: the stored results of earlier starts are not used, but replaced.
    """
    built = _Builder(settings, measures_anew=measures_anew)
    return built.engine(built.loaded)


def build_worker_engine(settings: WorkerSettings) -> EngineLike:
    """The engine of a worker, which may exchange adapters; raises ModelError, SettingsError."""
    if not settings.adapters:
        return build_engine(settings)
    from batchkv_worker.model.adapter_files import read_all

    files = read_all(settings.adapters)  # first: a fault in the settings costs no loading
    built = _Builder(settings, files)
    from batchkv_worker.engine.adapter_engine import AdapterEngine

    scheme = settings.kv_scheme
    return AdapterEngine(built.loaded, built.adapters, built.engine, scheme, built.access)


class _Builder:
    """Loads a model and its adapters once, and makes engines of it, one after the other."""

    def __init__(
        self,
        settings: WorkerSettings,
        files: Sequence[AdapterFiles] = (),
        *,
        measures_anew: bool = False,
    ) -> None:
        log.info(blas_name := blas.load())
        open_files.import_mlx_lm()
        from batchkv_worker.kv.backends.device import prepare_device
        from batchkv_worker.kv.backends.warm_up import EarlyLaunches
        from batchkv_worker.kv.start.backend import choose_backend
        from batchkv_worker.kv.start.kv_memory import read_facts
        from batchkv_worker.prefix.shared.access import open_access

        self._settings = settings
        self._has_built = False
        access = open_access(settings)  # first: a fault in the settings costs no loading
        self.access = replace(access, outlives_engine=bool(files)) if access else None
        prepare_device(wired_limit=settings.wired_limit)
        self._facts = read_facts(settings.cache)  # before the model takes its own
        self._device = choose_backend()  # after the default stream was chosen
        settings.check_device(self._facts.kind)
        self._early = EarlyLaunches(self._device)
        try:
            self._load(files, blas_name, measures_anew=measures_anew)
        except BaseException:
            self._early.close()
            raise

    def _load(self, files: Sequence[AdapterFiles], blas_name: str, *, measures_anew: bool) -> None:
        from batchkv_worker.engine.kept_measurements import open_backend
        from batchkv_worker.kv.backends.default_slots import slots_of_this_machine
        from batchkv_worker.kv.start.kv_memory import choose_memory
        from batchkv_worker.model.loader import load

        settings = self._settings
        ENGINE.enter(LOAD)
        loaded = self.loaded = load(
            *(settings.model, settings.dtype),
            is_careful=True,
            before_reading=self._before_reading,
        )
        self._early.end_warm_up(loading.report)
        self.adapters: tuple[LoadedAdapter, ...] = ()
        if files:
            from batchkv_worker.model.adapters import load_all

            self.adapters = load_all(files, loaded)
        slots = slots_of_this_machine() if settings.slots is None else settings.slots
        if settings.slots is None:
            log.info("%d rows decode at once on this device; --slots sets another number", slots)
        scheme = settings.kv_scheme
        self._slots = slots
        # Of the model alone: layers of the same shapes cost the same with an adapter.
        self._backend = open_backend(loaded, scheme, slots, blas_name, is_anew=measures_anew)
        held = loaded.weight_bytes + sum(adapter.num_bytes for adapter in self.adapters)
        self._memory_bytes = choose_memory(
            *(settings.model, self._facts, held, loaded.caches, scheme),
            *(loaded.dtype, settings.memory_bytes),
        )

    def _before_reading(self, model: Any, dtype: mx.Dtype) -> None:
        if (asked := self._settings.weights) != "packed":
            self._device.unpack_weights(model, dtype, has_room=asked == "unpacked")
        self._early.begin(model, dtype)

    def engine(self, loaded: LoadedModel) -> Engine:
        """An engine of the model as it is now, with an adapter or without."""
        from batchkv_worker.engine.engine import Engine, EngineConfig
        from batchkv_worker.engine.kept_measurements import warn_if_busy
        from batchkv_worker.engine.pressure import watch
        from batchkv_worker.kv.backends.device import compile_kernels

        settings, backend = self._settings, self._backend
        config = EngineConfig(
            scheme=settings.kv_scheme,
            slots=self._slots,
            prefetch=settings.rows_ahead(self._slots),
            chunk_tokens=settings.prefill_chunk,
            lane_chunk=settings.lane_chunk,
            memory_bytes=self._memory_bytes,
            backend=backend,
            admission=settings.admission,
            early=self._early,
            audit=settings.cache_audit,
        )
        loading.report("measuring the fastest settings")
        ENGINE.enter(MEASURE)
        try:
            engine = Engine(loaded, config, self.access, watch(self._facts.kind))
        finally:
            self._early.close()  # if the engine has not taken it
        if self._has_built:  # with another adapter, nothing below changes
            return engine
        self._has_built = True
        compile_kernels(loaded.dtype)
        warn_if_busy(backend.measurements, settings.model)
        log.info(
            "model %s: %s, %s, context %d, %.1f MB of weights; KV %s: %d bytes a token, "
            "up to %.1f MB in %d slots",
            *(loaded.name, loaded.caches, loaded.dtype, loaded.context),
            *(loaded.weight_bytes / 1e6, config.scheme, engine.bytes_per_token),
            *(config.memory_bytes / 1e6, config.slots),
        )
        return engine
