"""Puts a worker's figures together, for its record and for the totals of its queue."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple
from typing import Protocol

from batchkv_producer.wire.figures.samples import WorkCounts
from batchkv_producer.wire.figures.worker import WorkerFigures, encode_figures
from batchkv_worker.figures.engine import BATCH, LIVE, EngineFigures
from batchkv_worker.figures.histogram import Histogram
from batchkv_worker.figures.rows import RowCounts

# Counters of the shared store (``batchkv_cache_store.store``) -> keys of the figures. Those with a
# tier's name after a dot keep it.
_CACHE = {
    "hit": "cache_hits",
    "read_bytes": "cache_read_bytes",
    "stored": "cache_blocks_written",
    "stored_bytes": "cache_written_bytes",
    "error": "cache_errors",
    "skipped": "cache_skipped",
    "lookups": "cache_lookups",
    "wanted_blocks": "cache_blocks_wanted",
    "found_blocks": "cache_blocks_found",
    "dropped": "cache_blocks_dropped",
    "not_needed": "cache_blocks_not_needed",
    "lookups_empty": "cache_lookups_empty",
    "gave_up.slow": "cache_waits_ended.slow",
    "gave_up.held": "cache_waits_ended.held",
}


class CountsSteps(Protocol):
    """The engine's thread, as far as it has figures: ``engine.thread.EngineThread``."""

    steps: Histogram

    def figures(self) -> EngineFigures | None: ...


class Figures:
    """The figures of one worker's process. ``levels`` reads what the worker holds now.

    ``batch`` and ``live`` have the ends of its rows, by lane.
    """

    def __init__(
        self,
        engine: CountsSteps,
        levels: Callable[[], Mapping[str, float]],
        batch: RowCounts,
        live: RowCounts,
    ) -> None:
        self._engine = engine
        self._levels = levels
        self._lanes = {BATCH: batch, LIVE: live}
        self._since = time.time()
        self.name = secrets.token_hex(8)  # of this process, for the totals
        self.num_lost = 0  # leases of rows that were canceled or taken over

    @property
    def work(self) -> WorkCounts:
        """The rows and tokens of all lanes."""
        batch, live = (astuple(lane.work) for lane in self._lanes.values())
        return WorkCounts(*(a + b for a, b in zip(batch, live, strict=True)))

    def fields(self) -> dict[str, str]:
        """The field of the worker's record."""
        engine = self._engine.figures() or EngineFigures()
        work = self.work
        counts: dict[str, float] = {
            "tokens.prompt": work.prompt_tokens,
            "tokens.cached": work.cached_tokens,
            "tokens.completion": work.completion_tokens,
            "leases_lost": self.num_lost,
            **engine.counts,
            **_cache_counts(engine.cache),
        }
        for lane, rows in self._lanes.items():
            counts |= {f"rows.{lane}.{code}": n for code, n in rows.by_code.copy().items()}
        levels = {**self._levels(), **engine.levels}
        times = {"step": self._engine.steps.times, **engine.times}
        found = WorkerFigures(round(self._since, 3), counts, levels, times)
        return {"bkv_figures": encode_figures(found)}


def _cache_counts(counters: Mapping[str, int]) -> dict[str, int]:
    """The store's counters by the keys of the figures; others are left out."""
    found: dict[str, int] = {}
    for name, count in counters.items():
        first, _, tier = name.partition(".")
        if name in _CACHE:
            found[_CACHE[name]] = count
        elif tier and first in _CACHE:
            found[f"{_CACHE[first]}.{tier}"] = count
    return found
