"""A small engine with fixed choices, of a model whose vocabulary is known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from batchkv_worker.engine.engine import Engine, EngineConfig
from batchkv_worker.prefix.shared.access import Access
from support import tiny_models


@contextmanager
def small_engine(way: Access | None = None, seed: int = 0) -> Iterator[Engine]:
    """Random weights, float32, keys and values as they are."""
    loaded = tiny_models.loaded(
        tiny_models.build("llama", seed), vocabulary=tiny_models.VOCABULARY, weight_bytes=2**20
    )
    config = EngineConfig(
        "float", slots=6, chunk_tokens=512, memory_bytes=2**30, path="fused", group_cost=64
    )
    engine = Engine(loaded, tiny_models.with_measured(loaded.model, config), way)
    try:
        yield engine
    finally:
        engine.close()
