"""The state of an engine, for the log of a worker whose engine hangs. Counts, no content."""

from __future__ import annotations

import mlx.core as mx

from batchkv_worker.engine.decode_rows import DecodeRows
from batchkv_worker.engine.schedule.scheduler import Scheduler
from batchkv_worker.engine.tokens.choices import Choices


class Diagnostics:
    """``record`` is called by the engine after each step; ``report`` by any thread, at any time.

    Only ``record`` calls MLX: where MLX hangs, no other thread may call it.
    """

    def __init__(self, scheduler: Scheduler, decode_rows: DecodeRows, choices: Choices) -> None:
        self._scheduler = scheduler
        self._decode_rows = decode_rows
        self._choices = choices
        self._memory = (0, 0, 0)
        self.record()

    def record(self) -> None:
        """Read MLX's memory after a step."""
        self._memory = mx.get_active_memory(), mx.get_cache_memory(), mx.get_peak_memory()

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
            f"{self._decode_rows.num_preempted} had to leave{self._choices.report()}; "
            f"{held.slots / 1e6:.1f} MB in slots of {held.allowed / 1e6:.1f}; "
            f"MLX had {active:.1f} MB, {cached:.1f} to use again, {peak:.1f} at most"
        )
