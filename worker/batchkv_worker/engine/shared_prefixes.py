"""Which rows hold a common prefix once: the engine's side of ``kv.attention.shared_prefix``.

The scheduler says how much of a prefix is worth it, the prefix memory has the blocks, and slots
hold the stem as long as a row of theirs has it.
"""

from __future__ import annotations

from batchkv_cache_store.keys import BLOCK_TOKENS
from batchkv_worker.engine.schedule.prefix_split import Cuts
from batchkv_worker.kv.attention.shared_prefix import SharedPrefix
from batchkv_worker.kv.layers.decode import DecodeSlots
from batchkv_worker.prefix.memory import PrefixCache


class Stems:
    """Makes stems of blocks that are here."""

    def __init__(self, slots: DecodeSlots, prefixes: PrefixCache) -> None:
        self._slots = slots
        self._prefixes = prefixes

    def of(
        self, keys: list[bytes], cuts: Cuts, behind: SharedPrefix | None = None
    ) -> SharedPrefix | None:
        """A chain of stems of the blocks ``keys``, ending after as many as ``cuts`` say each.

        Those that are held already, by slots or by rows that were computed ``behind`` them, and new
        ones on them. None for no cuts, and when a block that is needed is gone.
        """
        held = self._slots.layouts.stems_with(behind)
        stem: SharedPrefix | None = None
        low = 0
        for high in cuts:
            found = held.get(keys[high - 1])
            if found is None:
                pieces = self._prefixes.stem_pieces(keys[low:high])
                if pieces is None:
                    return None
                found = self._slots.stem(keys[high - 1], high * BLOCK_TOKENS, pieces, stem)
            assert isinstance(found, SharedPrefix)  # no other parts are given to the slots
            stem, low = found, high
        return stem
