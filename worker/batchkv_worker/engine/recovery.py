"""Recovers the engine after MLX raised: memory ran out, or the device failed (``faults``).

Memory runs out although the budget is kept: other processes use the same memory, and activations
are not in the budget. On Metal and CUDA, MLX raises ``RuntimeError``. On a CPU the process dies.

The step's results are lost. It is not known how far the step got, so every row that it may have
changed is computed again.

Metal marks its encoder as failed from handlers that may run later than the exception. The next call
would raise although nothing is wrong with it. So the device is drained before anything else is
computed: one failure is counted once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress

import mlx.core as mx

from batchkv_worker.engine.decode_rows import DecodeRows
from batchkv_worker.engine.decode_step import OpenStep, Step
from batchkv_worker.engine.prefill import Prefill
from batchkv_worker.faults import WORKAROUNDS, is_device_fault
from batchkv_worker.kv.backends import device
from batchkv_worker.prefix.interface import PrefixClient
from batchkv_worker.prefix.memory import PrefixCache
from batchkv_worker.sequence import Sequence

log = logging.getLogger("batchkv.engine")

MAX_FAILURES = 2  # of a row that was alone when memory ran out; then it ends
FAULT_SECONDS = 60.0  # two device faults within this time end the engine


class Recovery:
    """Lets an engine go on. Rows whose arrays are lost wait again, after the tokens that were read.

    - *Memory ran out*: the budget shrinks below the bytes in use; every row that ends raises it a
      little. A row ends with an error when memory runs out ``MAX_FAILURES`` times while it is
      alone.
    - *The device failed*: the budget stays. Prompts are computed in chunks of half the size, since
      a display needs shorter work. A second failure within ``FAULT_SECONDS`` is raised.
    """

    def __init__(
        self,
        prefill: Prefill,
        decode_rows: DecodeRows,
        prefixes: PrefixCache,
        client: PrefixClient,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler = decode_rows.scheduler
        self._prefill = prefill
        self._decode_rows = decode_rows
        self._prefixes = prefixes
        self._client = client
        self._memory = scheduler.memory
        self._clock = clock
        self._failed_at = -FAULT_SECONDS  # when the device failed last
        self.num_out_of_memory = 0
        self.num_device_faults = 0

    def recover(
        self, fault: Exception, steps: list[Step | OpenStep], *, in_prefill: bool
    ) -> list[Sequence]:
        """Requeue the rows that are lost. Returns those that have failed too often alone.

        ``in_prefill``: memory ran out while a prompt was computed, so the slots are unchanged.
        ``steps``: decode steps that were not read back; they are lost with the slots. Raises
        ``fault`` when the engine cannot go on.
        """
        is_of_device = is_device_fault(fault)
        if is_of_device:
            self._count_device_fault(fault)
        else:
            self.num_out_of_memory += 1
        device.drain()  # before arrays are dropped that the device may still write to
        held = self._memory.snapshot(self._scheduler.group).total
        num_rows = len(self._decode_rows.by_slot)
        lost = self._scheduler.abandon_group()
        num_rows += len(lost)
        if not in_prefill:
            found = {id(row): row for step in steps for row in step.rows if row is not None}
            found |= {id(row): row for row in self._decode_rows.lose_all()}
            again = [row for row in found.values() if not row.is_ended]
            num_rows = len(again) + len(lost)
            self._decode_rows.extend_keys(again)
            lost = again + lost
        self._prefill.close()
        self._prefixes.clear()
        self._client.drop_unsent()
        if is_of_device:
            self._halve_chunk(fault, len(lost), num_rows)
        else:
            self._shrink(fault, held, len(lost), num_rows)
        with suppress(RuntimeError, MemoryError):  # a late report of the same: drained below
            mx.clear_cache()
        if not device.drain():
            raise fault
        for row in lost:
            row.recompute(was_alone=num_rows == 1 and not is_of_device)
        self._scheduler.requeue(row for row in lost if row.num_failures < MAX_FAILURES)
        return [row for row in lost if row.num_failures >= MAX_FAILURES]

    def _count_device_fault(self, fault: Exception) -> None:
        """Raises the second of two faults that come within FAULT_SECONDS."""
        self.num_device_faults += 1
        before, self._failed_at = self._failed_at, self._clock()
        if self._failed_at - before < FAULT_SECONDS:
            raise fault

    def _shrink(self, fault: Exception, held: int, num_lost: int, num_rows: int) -> None:
        before = self._memory.budget.memory_bytes
        self._memory.shrink(held)
        log.warning(
            "memory ran out (%s): %d of %d rows are computed again, with %.1f MB for keys and "
            "values instead of %.1f",
            *(str(fault)[:200], num_lost, num_rows),
            *(self._memory.budget.memory_bytes / 1e6, before / 1e6),
        )

    def _halve_chunk(self, fault: Exception, num_lost: int, num_rows: int) -> None:
        self._memory.halve_chunk()
        log.warning(
            "the device failed (%s): %d of %d rows are computed again, prompts in chunks of %d "
            "tokens. %s",
            *(str(fault)[:200], num_lost, num_rows, self._memory.budget.chunk_tokens, WORKAROUNDS),
        )
