"""Gives memory back while the machine is short of it (``pressure``).

*Warning*: no group of prompts starts while rows decode. When all of them have ended the next group
starts, so that no row waits for ever. *Critical*: every few seconds the budget shrinks below the
bytes in use, as it does when memory runs out. Rows that do not fit any more leave their slots and
are computed again later. Memory of prefixes, and freed memory that MLX keeps, is given back.

When the machine has memory again, rows that end bring the budget back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import mlx.core as mx

from batchkv_producer.agreed import SHORT_OF_MEMORY
from batchkv_worker.engine.decode_rows import DecodeRows
from batchkv_worker.engine.pressure import Level, Pressure
from batchkv_worker.prefix.memory import PrefixCache

log = logging.getLogger("batchkv.engine")

SHRINK_SECONDS = 5.0  # between two times: macOS needs a while to notice
_WORTH = 16  # a part of the budget so small that giving it back would not help
_WORTH_A_LINE = 2**20  # bytes given back that are logged


class Relief:
    """Called by the engine in each step, and now and then while it is idle."""

    def __init__(
        self,
        pressure: Pressure,
        decode_rows: DecodeRows,
        prefixes: PrefixCache,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pressure = pressure
        self._decode_rows = decode_rows
        self._scheduler = decode_rows.scheduler
        self._prefixes = prefixes
        self._clock = clock
        self._level = Level.NORMAL
        self._shrink_at = 0.0
        self.num_times = 0  # how often the budget shrank

    @property
    def words(self) -> str:
        """For the worker's record; empty while there is enough memory. From any thread."""
        return SHORT_OF_MEMORY if self._level > Level.NORMAL else ""

    @property
    def level(self) -> int:
        """0: there is enough memory; 1: little; 2: it is critical. From any thread."""
        return (Level.NORMAL, Level.WARNING, Level.CRITICAL).index(self._level)

    def close(self) -> None:
        """Watch the machine no more."""
        self._pressure.close()

    def apply(self, read_back: Callable[[], bool]) -> None:
        """Act on the present level. ``read_back`` reads the step in flight."""
        level = self._pressure.level
        if level != self._level:
            self._note(level)
        if level < Level.CRITICAL or self._clock() < self._shrink_at:
            return
        self._shrink_at = self._clock() + SHRINK_SECONDS
        self._give_back(read_back)

    def _note(self, level: Level) -> None:
        before, self._level = self._level, level
        self._scheduler.hold(level > Level.NORMAL)
        if level == Level.NORMAL:
            log.info("this machine has enough memory again: rows start as before")
        elif before == Level.NORMAL:
            log.warning(
                "this machine is short of memory: while rows decode, no other row starts. Close "
                "other programs, or lower --memory or --slots"
            )

    def _give_back(self, read_back: Callable[[], bool]) -> None:
        memory, scheduler = self._scheduler.memory, self._scheduler
        read_back()
        held = memory.snapshot(scheduler.group).total
        before = mx.get_active_memory() + mx.get_cache_memory()
        num_left = 0
        if held > memory.whole.memory_bytes // _WORTH:
            memory.shrink(held)
            num_left = self._decode_rows.shed()
            self.num_times += 1
        self._prefixes.clear()
        mx.clear_cache()
        num_bytes = before - mx.get_active_memory() - mx.get_cache_memory()
        if num_left or num_bytes >= _WORTH_A_LINE:
            log.warning(
                "memory is critical: %.1f MB are given back, and %d rows wait to be computed "
                "again; keys and values may take %.1f MB now",
                *(max(0, num_bytes) / 1e6, num_left, memory.budget.memory_bytes / 1e6),
            )
