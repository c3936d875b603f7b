"""Builds the shared prefixes that rows of the engine read.

The scheduler chooses the split points. The prefix memory has the blocks. The slots keep a shared
prefix as long as a row in them reads it.
"""

from __future__ import annotations

from batchkv_worker.engine.schedule.prefill_group import PrefillGroup
from batchkv_worker.engine.schedule.prefix_split import SplitPoints, key_at
from batchkv_worker.kv.attention.shared_prefix import SharedPrefix
from batchkv_worker.kv.layers.decode import DecodeSlots
from batchkv_worker.prefix.memory import PrefixCache
from batchkv_worker.sequence import Sequence


class SharedPrefixBuilder:
    """Builds chains of shared prefixes from blocks in memory."""

    def __init__(self, slots: DecodeSlots, prefixes: PrefixCache) -> None:
        self._slots = slots
        self._prefixes = prefixes

    def of_group(self, group: PrefillGroup) -> SharedPrefix | None:
        """The chain that all rows of a group are computed after."""
        return self.build(group.rows[0], group.split_points)

    def build(
        self, row: Sequence, points: SplitPoints, computed_after: SharedPrefix | None = None
    ) -> SharedPrefix | None:
        """A chain of a row's first tokens, whose parts end at the split points.

        Parts that rows in slots read are used again, and so is ``computed_after``, the prefix that
        the rows were computed with. Other parts are copied from the prefix memory. None without
        split points, and when a block is not in memory any more.
        """
        held = self._slots.layouts.prefixes_with(computed_after)
        last: SharedPrefix | None = None
        low = 0
        for high in points:
            key = key_at(row, high)
            assert key is not None
            part = held.get(key)
            if part is None:
                pieces = self._prefixes.prefix_pieces(row, low, high)
                if pieces is None:
                    return None
                part = self._slots.make_prefix(key, high, pieces, last)
            assert isinstance(part, SharedPrefix)  # the slots are given no parts without arrays
            last, low = part, high
        return last
