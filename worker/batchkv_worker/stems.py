"""Which rows hold a common prefix once: the engine's side of ``kv.stem``.

The scheduler says how much of a prefix is worth it, the prefix memory has the blocks, and slots
hold the stem as long as a row of theirs has it.
"""

from __future__ import annotations

from batchkv_cache_store.keys import BLOCK_TOKENS
from batchkv_worker.kv.decode import DecodeSlots
from batchkv_worker.kv.stem import Stem
from batchkv_worker.prefix import PrefixCache
from batchkv_worker.scheduler import Scheduler
from batchkv_worker.sequence import Sequence


class Stems:
    """Makes stems of blocks that are here."""

    def __init__(self, slots: DecodeSlots, prefixes: PrefixCache, scheduler: Scheduler) -> None:
        self._slots = slots
        self._prefixes = prefixes
        self._scheduler = scheduler

    def of_leader(self, row: Sequence) -> Stem | None:
        """For a row that has computed what others wait for: it shares it with them from now on.

        Else its long line in the slots would make those of all its followers as long.
        """
        keys = row.block_keys[: self._scheduler.stem_blocks(row, row.num_prefill)]
        return self.of(keys) if keys else None

    def of(self, keys: list[bytes]) -> Stem | None:
        """The stem that rows in slots have already, or a new one; None when a block is gone."""
        for stem in self._slots.layouts.stems.values():
            if stem.key == keys[-1]:
                return stem
        pieces = self._prefixes.stem_pieces(keys)
        if pieces is None:
            return None
        return self._slots.stem(keys[-1], len(keys) * BLOCK_TOKENS, pieces)
