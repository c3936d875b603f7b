"""The facts of workers for the page: those of ``workers --json``, and what their figures say."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from redis import Redis

from batchkv_producer.monitor.workers import COMPARED_SECONDS, WorkerInfo, read_workers
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.figures.worker import BUSY_SECONDS, WorkerFigures, decode_figures

FIELD = "bkv_figures"
HITS, WANTED = "cache_hits.", "cache_blocks_wanted"
_PRESSURE = ("none", "warning", "critical")


class WorkerFacts:
    """Reads the live workers. ``text`` is their JSON, ``found`` their records."""

    def __init__(self, connection: Redis) -> None:
        self._connection = connection
        self._seen: dict[str, int] = {}
        self.found: Sequence[WorkerInfo] = ()
        self.text = "[]"

    def look(self) -> None:
        """Read them anew. The text stays the same while no worker has reported anything."""
        self.found = read_workers(self._connection)
        with self._connection.pipeline(transaction=False) as pipeline:
            for worker in self.found:
                pipeline.hget(redis_keys.worker(worker.name), FIELD)
            raw: list[Any] = pipeline.execute()
        now = int(time.time())
        fields = [
            self._fields(worker, decode_figures((text or b"").decode("utf-8", "replace")), now)
            for worker, text in zip(self.found, raw, strict=True)
        ]
        self._seen = {one["name"]: one["seen_at"] for one in fields}
        self.text = json.dumps(fields, separators=(",", ":"))

    def _fields(
        self, worker: WorkerInfo, figures: WorkerFigures | None, now: int
    ) -> dict[str, Any]:
        fields = asdict(worker)
        for name in ("silent_seconds", "last_heartbeat"):  # these would change at every look
            del fields[name]
        seen = now - int(worker.silent_seconds)
        # Both clocks show whole seconds, so the same heartbeat may seem to be a second apart.
        before = self._seen.get(worker.name, 0)
        fields["seen_at"] = before if abs(before - seen) <= 1 else seen
        fields |= {"shown_state": worker.shown_state, "is_drained": worker.is_drained}
        return {**fields, **figures_of(figures)}


def figures_of(figures: WorkerFigures | None) -> dict[str, Any]:
    """The page's part of a worker's figures. Empty for a worker of an older version."""
    if figures is None:
        return {}
    level = figures.levels.get("pressure")
    prompt = figures.counts.get("tokens.prompt", 0)
    share = figures.counts.get("tokens.cached", 0) / prompt if prompt else None
    return {
        "kv_memory": figures.levels.get("kv_memory"),
        "kv_budget": figures.levels.get("kv_memory_budget"),
        "slots_used": figures.levels.get("rows.decode"),
        "is_comparable": figures.levels.get(BUSY_SECONDS, 0.0) >= COMPARED_SECONDS,
        "pressure": None if level is None else _PRESSURE[min(int(level), len(_PRESSURE) - 1)],
        "cached_share": share,
        "hit_rates": hit_rates(figures.counts),
    }


def hit_rates(counts: Mapping[str, float]) -> dict[str, float]:
    """Tier -> its share of the blocks that were asked for from the shared cache."""
    wanted = counts.get(WANTED, 0)
    if not wanted:
        return {}
    return {
        name.removeprefix(HITS): min(1.0, hits / wanted)
        for name, hits in sorted(counts.items())
        if name.startswith(HITS)
    }
