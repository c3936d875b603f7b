"""Out of memory: how it is recognized, and how the engine goes on.

It happens although the budget is kept: other processes use the same memory, and activations are not
in the budget. On Metal and CUDA, MLX raises ``RuntimeError`` when an allocation fails. On a CPU the
process dies. What was being computed is lost. It is not known how far it got, so every row that may
have been touched is computed again.
"""

from __future__ import annotations

import logging

import mlx.core as mx

from batchkv_worker.engine.decode_rows import DecodeRows
from batchkv_worker.engine.decode_step import Step
from batchkv_worker.engine.prefill import Prefill
from batchkv_worker.prefix.interface import PrefixClient
from batchkv_worker.prefix.memory import PrefixCache
from batchkv_worker.sequence import Sequence

log = logging.getLogger("batchkv.engine")

MAX_FAILURES = 2  # of a row that was alone; then it ends

# Parts of the messages, in lower case: MLX's allocators, Metal's command buffers, CUDA's runtime.
_SIGNS = (
    "unable to allocate",
    "attempting to allocate",
    "insufficient memory",
    "out of memory",
    "outofmemory",
    "resource limit",
)


def is_out_of_memory(fault: BaseException) -> bool:
    """Whether an exception of MLX says that an allocation failed."""
    text = str(fault).lower()
    return isinstance(fault, MemoryError) or any(sign in text for sign in _SIGNS)


def is_at_once(fault: BaseException) -> bool:
    """Whether the allocation itself raised it, not the device later."""
    return isinstance(fault, MemoryError) or "allocat" in str(fault).lower()


class OomRecovery:
    """Lets an engine go on after memory ran out.

    Rows whose arrays are lost wait again, and go on after the tokens that were read. The budget
    shrinks below what was held; every row that ends raises it a little. A row ends with an error
    when memory runs out ``MAX_FAILURES`` times while it is alone.
    """

    def __init__(
        self, prefill: Prefill, decode_rows: DecodeRows, prefixes: PrefixCache, client: PrefixClient
    ) -> None:
        self._scheduler = scheduler = decode_rows.scheduler
        self._prefill = prefill
        self._decode_rows = decode_rows
        self._prefixes = prefixes
        self._client = client
        self._memory = scheduler.memory
        self.num_times = 0

    def recover(
        self, fault: BaseException, steps: list[Step], *, in_prefill: bool
    ) -> list[Sequence]:
        """Requeue the rows that are lost. Returns those that have failed too often alone.

        ``in_prefill``: memory ran out while a prompt was computed, so the slots are unchanged.
        ``steps``: decode steps that were not read back; they are lost with the slots.
        """
        self.num_times += 1
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
        self._prefill.drop()
        self._prefixes.clear()
        self._client.drop_unsent()
        self._shrink(fault, held, len(lost), num_rows)
        for row in lost:
            row.recompute(was_alone=num_rows == 1)
        self._scheduler.requeue(row for row in lost if row.num_failures < MAX_FAILURES)
        return [row for row in lost if row.num_failures >= MAX_FAILURES]

    def _shrink(self, fault: BaseException, held: int, num_lost: int, num_rows: int) -> None:
        before = self._memory.budget.memory_bytes
        self._memory.shrink(held)
        mx.clear_cache()
        log.warning(
            "memory ran out (%s): %d of %d rows are computed again, with %.1f MB for keys and "
            "values instead of %.1f",
            *(str(fault)[:200], num_lost, num_rows),
            *(self._memory.budget.memory_bytes / 1e6, before / 1e6),
        )
