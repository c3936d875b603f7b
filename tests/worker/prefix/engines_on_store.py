"""Engines that share a store, in one process: what one computes, another takes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from batchkv_cache_store.lease import Leases, LocalLeases
from batchkv_cache_store.store import Store
from batchkv_cache_store.tiers.base import Tier
from batchkv_cache_store.tiers.disk import DiskTier
from batchkv_worker.engine.engine import Engine, EngineConfig
from batchkv_worker.events import Completed
from batchkv_worker.prefix.shared.access import Access
from batchkv_worker.sequence import Generation
from batchkv_worker.sequence import Sequence as Row
from support import tiny_models

BLOCK = 256
MAX_STEPS = 200_000
DEADLINE_SECONDS = 60.0


def random_prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(tiny_models.VOCABULARY) for _ in range(length)]


def behind(num_common: int, *lengths: int, seed: int = 0) -> list[list[int]]:
    """Prompts of the same tokens and then of others, so many each."""
    common = random_prompt(seed, num_common)
    return [[*common, *random_prompt(seed + 1 + n, length)] for n, length in enumerate(lengths)]


def on_disk(folder: Path, max_bytes: int = 2**30) -> list[Tier]:
    """One tier, the folder that workers share."""
    return [DiskTier(folder, max_bytes)]


def access(tiers: Sequence[Tier], leases: Leases | None = None, **changes: Any) -> Access:
    """A worker's way to a store of its own over these tiers."""
    secret = changes.pop("secret", None)
    return Access(Store(tiers, secret=secret), leases or LocalLeases(), **changes)


@contextmanager
def running(
    model: Any, way: Access | None, scheme: str = "float", **changes: Any
) -> Iterator[Engine]:
    """An engine; at the end all that it has written is on the tiers."""
    # A fixed path and cost: measuring them takes longer than these tests.
    fixed = {"path": "fused", "group_cost": 64}
    sizes = {"slots": 6, "chunk_tokens": 512, "memory_bytes": 2**30}
    values: dict[str, Any] = {**fixed, **sizes, **changes}
    loaded = {key: values.pop(key) for key in ("dtype", "config", "adapter") if key in values}
    config = tiny_models.with_measured(model, EngineConfig(scheme, **values))
    engine = Engine(tiny_models.loaded(model, **loaded), config, way)
    try:
        yield engine
    finally:
        engine.close()


def run(engine: Engine, prompts: Sequence[list[int]], count: int = 8) -> list[Completed]:
    """All prompts at once, greedy, to their ends; the answers in the prompts' order."""
    for index, prompt in enumerate(prompts):
        engine.submit_row(Row(str(index), prompt, Generation(count, temperature=0.0)))
    return finish(engine, len(prompts))


def finish(engine: Engine, count: int) -> list[Completed]:
    """Step until the engine is idle; the answers by number."""
    ended: dict[str, Completed] = {}
    for _ in range(MAX_STEPS):
        if engine.is_idle:
            break
        for event in engine.step():
            assert isinstance(event, Completed), event
            ended[event.job_id] = event
        engine.check_integrity()
    assert engine.is_idle, "the engine does not come to rest"
    return [ended[str(index)] for index in range(count)]


def tokens(events: Sequence[Completed]) -> list[tuple[int, ...]]:
    return [event.token_ids for event in events]


def cached(events: Sequence[Completed]) -> list[int]:
    return [event.usage.cached for event in events]


def eventually(is_so: Callable[[], object]) -> None:
    """Wait until it is so, on other threads."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.01)
