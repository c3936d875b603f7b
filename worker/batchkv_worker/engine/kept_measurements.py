"""Which measurements an engine may use again: those of this machine, model, scheme and slots."""

from __future__ import annotations

import logging
import os
from collections import Counter

from batchkv_producer.errors import BatchkvError
from batchkv_producer.server.home import home_from_environment
from batchkv_worker.kv.backends.contract import Backend
from batchkv_worker.kv.backends.measurements import Measurements
from batchkv_worker.kv.start.backend import choose_backend
from batchkv_worker.kv.start.machine import machine_facts
from batchkv_worker.model.loader import LoadedModel

BUSY = 1.5  # processes that were ready to run in the last minute, for each CPU

log = logging.getLogger("batchkv.engine")


def open_measurements(
    loaded: LoadedModel, scheme: str, slots: int, blas: str, *, is_anew: bool = False
) -> Measurements:
    """The measurements in the home folder for an engine of this kind.

    The fingerprint of a model's files identifies its weights: models that differ share no results.
    For a model without one nothing is stored. ``is_anew``: all is measured again.
    """
    if not loaded.fingerprint:
        log.info("model %s has no fingerprint: measurements for it are not stored", loaded.name)
        return Measurements()
    try:
        home = home_from_environment().path
    except BatchkvError as fault:
        log.warning("measurements are not stored: %s", fault)
        return Measurements()
    config = loaded.config
    facts = {
        **machine_facts(blas),
        "model": loaded.fingerprint,
        "class": type(loaded.model).__module__,
        "layers": [f"{count} x {leaf}" for leaf, count in Counter(loaded.caches.leaves).items()],
        "vocabulary": loaded.vocabulary,
        "context": loaded.context,
        "quantization": str(config.get("quantization") or config.get("quantization_config") or ""),
        "weight_bytes": loaded.weight_bytes,
        "adapter": loaded.adapter,
        "dtype": str(loaded.dtype),
        "scheme": scheme,
        "slots": slots,
    }
    return Measurements.in_home(home, facts, is_anew=is_anew)


def open_backend(
    loaded: LoadedModel, scheme: str, slots: int, blas: str, *, is_anew: bool = False
) -> Backend:
    """The device's backend with these measurements."""
    return choose_backend(open_measurements(loaded, scheme, slots, blas, is_anew=is_anew))


def warn_if_busy(measurements: Measurements, model: str) -> None:
    """Say so if something was measured just now while others computed on this machine."""
    try:
        load = os.getloadavg()[0]
    except OSError:
        return
    if measurements.has_measured and load > BUSY * (os.cpu_count() or 1):
        log.warning(
            "this machine was busy while it was measured, and the results are stored: run "
            "`batchkv tune -m %s` while nothing else computes",
            model,
        )
