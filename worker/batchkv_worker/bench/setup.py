"""The model of a bench, and the configuration that a worker would give its engine."""

from __future__ import annotations

from batchkv_worker.engine.config import EngineConfig
from batchkv_worker.kv.backends.default_slots import slots_of_this_machine
from batchkv_worker.kv.backends.device import prepare_device
from batchkv_worker.kv.start.backend import choose_backend
from batchkv_worker.kv.start.kv_memory import choose_memory, read_facts
from batchkv_worker.model.loader import LoadedModel, load


def load_model(
    name: str, dtype: str, scheme: str, slots: int | None
) -> tuple[LoadedModel, EngineConfig]:
    """Load a model; the configuration is a worker's at its defaults, under a KV scheme.

    The size of chunks is the backend's usual one: a bench makes many engines, and is not to measure
    it for each. Raises ModelError and SettingsError.
    """
    prepare_device(wired_limit=False)
    facts = read_facts(None)  # before the model takes its own
    loaded = load(name, dtype, before_reading=choose_backend().unpack_weights)
    memory_bytes = choose_memory(
        *(name, facts, loaded.weight_bytes, loaded.caches, scheme, loaded.dtype, None)
    )
    config = EngineConfig(
        scheme=scheme,
        slots=slots or slots_of_this_machine(),
        chunk_tokens=choose_backend().usual_chunk,
        memory_bytes=memory_bytes,
    )
    return loaded, config
