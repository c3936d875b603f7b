"""What an engine was doing, for the log of a worker that found it hung. Counts, no content."""

from __future__ import annotations

import mlx.core as mx

from batchkv_worker.engine.decode_rows import SlotRows
from batchkv_worker.engine.schedule.scheduler import Scheduler


class Vitals:
    """``beat`` is called by the engine after each step; ``report`` by any thread, at any time.

    MLX is asked at the beat alone: where it hangs, nobody else may call it.
    """

    def __init__(self, scheduler: Scheduler, slot_rows: SlotRows) -> None:
        self._scheduler = scheduler
        self._slot_rows = slot_rows
        self._memory = (0, 0, 0)
        self.beat()

    def beat(self) -> None:
        """A step has ended."""
        self._memory = mx.get_active_memory(), mx.get_cache_memory(), mx.get_peak_memory()

    def memory_bytes(self) -> int:
        """What MLX had allocated at the last beat."""
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
            f"{len(self._slot_rows.by_slot)} rows decode, {self._slot_rows.num_preempted} had to "
            f"leave; {held.slots / 1e6:.1f} MB in slots of "
            f"{held.allowed / 1e6:.1f}; MLX had {active:.1f} MB, "
            f"{cached:.1f} to use again, {peak:.1f} at most"
        )
