"""A worker whose engine is the real one, on a tiny model with random weights.

``rq worker -w support.tiny_worker.TinyWorker``: all of the product but the loading of a model from
files. The cache, the KV scheme and the slots are those of the settings. Prompts and answers are
numbers, as ``tiny_models.NumberTokenizer`` writes them. ``TinyChatWorker`` has a tokenizer of
bytes, a chat template, and the markers of a model that thinks and calls tools.

The plan in the variable FAKE_PLAN may say ``step_seconds``, a pause before each step; ``vitals``, a
file that gets a line of JSON now and then: what MLX holds; ``faults``, the numbers of the decode
steps in which the device fails; and ``fingerprint``, that of the model.
"""

from __future__ import annotations

import gc
import json
import os
import time
from dataclasses import replace
from functools import partial
from typing import Any

from batchkv_worker.queue.rq_worker import BatchWorker
from batchkv_worker.settings import WorkerSettings

FAMILY = "llama"
VITALS_SECONDS = 0.5
METAL_FAULT = (
    "[METAL] Command buffer execution failed: Impacting Interactivity "
    "(0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)"
)
COMMAND_CLASS = "support.tiny_worker.TinyWorker"
CHAT_CLASS = "support.tiny_worker.TinyChatWorker"
CHAT_KIND = "qwen3"


def build_tiny(settings: WorkerSettings, family: str = FAMILY, chat: str = "") -> Any:
    """The engine; called on the engine's thread, where MLX may be imported.

    ``chat``: the kind of a tokenizer (``tiny_tokenizers``); none is one of numbers.
    """
    from batchkv_worker.engine.engine import Engine, EngineConfig
    from batchkv_worker.prefix.shared.access import open_access
    from support import tiny_models
    from support.fake_engine import rows_of

    slots, prefetch = rows_of(settings)
    config = EngineConfig(
        scheme=settings.kv_scheme,
        slots=slots,
        prefetch=prefetch,
        chunk_tokens=settings.prefill_chunk,
        memory_bytes=settings.memory_bytes or 2**28,
        path="fused",  # measuring the paths would take longer than the tests
        group_cost=64,
    )
    access = open_access(settings)
    model = tiny_models.build(family)
    loaded = tiny_models.loaded_chat(model, chat) if chat else tiny_models.loaded(model)
    plan = json.loads(os.environ.get("FAKE_PLAN", "{}"))
    loaded = replace(loaded, fingerprint=plan.get("fingerprint", ""))
    engine = Engine(loaded, tiny_models.with_measured(model, config), access)
    pause, vitals = plan.get("step_seconds", 0.0), plan.get("vitals")
    _plant_faults(plan.get("faults", []))
    step, tell_at = engine.step, [0.0]

    def paced() -> Any:
        time.sleep(pause)
        if vitals and time.monotonic() >= tell_at[0]:
            _tell(vitals)
            tell_at[0] = time.monotonic() + VITALS_SECONDS
        return step()

    engine.step = paced  # type: ignore[method-assign]
    return engine


def _plant_faults(steps: list[int]) -> None:
    """Let the graphs of these decode steps raise what Metal does; the first is number 1."""
    from batchkv_worker.kv.layers.decode import DecodeSlots

    end_step, number = DecodeSlots.end_step, [0]

    def end(self: Any) -> None:
        number[0] += 1
        if number[0] in steps:
            raise RuntimeError(METAL_FAULT)
        end_step(self)

    if steps:
        DecodeSlots.end_step = end  # type: ignore[method-assign]


def _tell(path: str) -> None:
    import mlx.core as mx

    gc.collect()
    arrays = sum(isinstance(thing, mx.array) for thing in gc.get_objects())
    line = {"arrays": arrays, "active": mx.get_active_memory(), "cached": mx.get_cache_memory()}
    with open(path, "a") as file:
        file.write(json.dumps(line) + "\n")


class TinyWorker(BatchWorker):
    """BatchWorker on a tiny model."""

    engine_factory = staticmethod(build_tiny)


class TinyChatWorker(BatchWorker):
    """BatchWorker on a tiny model that thinks and calls tools."""

    engine_factory = staticmethod(partial(build_tiny, chat=CHAT_KIND))
