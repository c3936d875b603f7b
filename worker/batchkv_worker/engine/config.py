"""The configuration of an engine, made from a worker's settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from batchkv_worker.engine.schedule.prefix_split import MAX_PARTS, PrefixCosts
from batchkv_worker.kv.attention.paths import Path
from batchkv_worker.kv.backends.contract import Backend
from batchkv_worker.kv.backends.launching import Launches
from batchkv_worker.kv.backends.warm_up import EarlyLaunches
from batchkv_worker.kv.start.plan import KvPlan
from batchkv_worker.settings import Admission


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How the engine works. ``memory_bytes`` bounds keys and values, not weights."""

    scheme: str = "affine8"
    slots: int = 32
    prefetch: int = 8
    chunk_tokens: int | None = 512  # None: the smallest size that is nearly the fastest here
    lane_chunk: int = 256  # of prompts of batches while somebody waits for other rows
    memory_bytes: int = 4 * 2**30
    prefix_bytes: int | None = None  # of memory_bytes, for prefixes; None: an eighth
    path: Path | None = None  # None: the fastest by measurement
    group_cost: int | None = None  # cells that one more group of rows costs; None: measured
    prefix_cells: int | None = None  # cells that a shared prefix must save; None: measured
    max_parts: int = MAX_PARTS  # shared prefixes in the chain that one row reads
    share: bool = True  # store and attend shared prefixes once, if the model allows it
    backend: Backend | None = None  # None: that of the device that serves
    admission: Admission = "optimistic"
    early: EarlyLaunches | None = None  # what launches for the first engine; else it makes its own
    audit: float = 0.0  # share of the rows with a cached prefix that are computed again without it

    def prefix_costs(self, plan: KvPlan) -> PrefixCosts:
        """Cells that shared prefixes must save under a plan."""
        another = plan.prefix_cells + plan.shapes.group_cost
        return PrefixCosts(plan.prefix_cells, another, self.max_parts, plan.joined_tokens)

    def launches(self, plan: KvPlan, make: Callable[..., Launches]) -> Launches:
        """What launches for an engine of ``plan``: what is there, or what ``make`` makes."""
        is_beside = plan.backend.launches_beside and plan.replays
        early = self.early.take(is_wanted=is_beside) if self.early is not None else None
        return early or make(is_beside=is_beside)
