"""The state of an engine: figures, and a line for the log if it hangs. Counts, no content."""

from __future__ import annotations

import time
from collections.abc import Callable

import mlx.core as mx

from batchkv_worker.engine.recovery import Recovery
from batchkv_worker.engine.relief import Relief
from batchkv_worker.engine.row_ends import RowEnds
from batchkv_worker.figures.engine import (
    COMPUTED_ANSWER,
    COMPUTED_PROMPT,
    IN_DECODE,
    IN_PREFILL,
    IN_WAITING,
    EngineFigures,
    Progress,
)

Readers = tuple[
    Callable[[], str], Callable[[], int], Callable[[], EngineFigures], Callable[[], Progress]
]
LEVELS_SECONDS = 1.0  # between two looks at what is held


class Diagnostics:
    """``record`` is called by the engine after each step; ``report`` by any thread, at any time.

    Only ``record`` calls MLX: where MLX hangs, no other thread may call it.
    """

    def __init__(self, ends: RowEnds, recovery: Recovery, relief: Relief) -> None:
        self._ends = ends
        self._decode_rows = ends.decode_rows
        self._scheduler = ends.decode_rows.scheduler
        self._recovery = recovery
        self._relief = relief
        self._memory = (0, 0, 0)
        self._levels: dict[str, float] = {}
        self._levels_at = 0.0
        self.record()

    @property
    def readers(self) -> Readers:
        """``report``, ``memory_bytes``, ``figures`` and ``progress``, for the engine's own face."""
        return self.report, self.memory_bytes, self.figures, self.progress

    def record(self) -> None:
        """Read MLX's memory after a step."""
        self._memory = mx.get_active_memory(), mx.get_cache_memory(), mx.get_peak_memory()
        now = time.monotonic()
        if now >= self._levels_at:
            self._levels_at = now + LEVELS_SECONDS
            self._levels = self._read_levels()

    def _read_levels(self) -> dict[str, float]:
        held = self._scheduler.memory.snapshot(self._scheduler.group)
        return {
            "memory.active": self._memory[0],
            "memory.cached": self._memory[1],
            "memory.peak": self._memory[2],
            "kv_memory": held.total,
            "kv_memory_budget": held.allowed,
            "pressure": self._relief.level,
        }

    def figures(self) -> EngineFigures:
        """What was counted, and what was held in the last second. From any thread."""
        progress = self.progress()
        counts = {
            COMPUTED_PROMPT: progress.num_prompt,
            COMPUTED_ANSWER: progress.num_generated,
            "preemptions": self._decode_rows.num_preempted,
            "recoveries.memory": self._recovery.num_out_of_memory,
            "recoveries.device": self._recovery.num_device_faults,
            "recoveries.pressure": self._relief.num_times,
        }
        rows = {
            IN_DECODE: progress.num_decode,
            IN_PREFILL: progress.num_prefill,
            IN_WAITING: progress.num_waiting,
        }
        levels = {**self._levels, **rows}
        return EngineFigures(counts, levels, self._ends.times.times, self._ends.client.counters)

    def progress(self) -> Progress:
        """The rows and tokens alone. From any thread."""
        group = self._scheduler.group
        return Progress(
            num_waiting=self._scheduler.num_waiting,
            num_prefill=len(group.rows) if group is not None else 0,
            num_decode=len(self._decode_rows.by_slot),
            num_prompt=self._ends.prefill.num_computed,
            num_generated=self._ends.num_generated,
        )

    def memory_bytes(self) -> int:
        """Bytes that MLX had allocated after the last step."""
        return self._memory[0]

    def report(self) -> str:
        """One line; numbers may be of different moments."""
        group = self._scheduler.group
        held = self._scheduler.memory.snapshot()
        prompts = "no prompt"
        if group is not None:
            prompts = f"{len(group.rows)} prompts at token {group.position} of {group.width}"
        active, cached, peak = (num_bytes / 1e6 for num_bytes in self._memory)
        return (
            f"{self._scheduler.num_waiting} rows wait, {prompts} in prefill, "
            f"{len(self._decode_rows.by_slot)} rows decode, "
            f"{self._decode_rows.num_preempted} had to leave{self._ends.choices.report()}; "
            f"{held.slots / 1e6:.1f} MB in slots of {held.allowed / 1e6:.1f}; "
            f"MLX had {active:.1f} MB, {cached:.1f} to use again, {peak:.1f} at most"
        )
