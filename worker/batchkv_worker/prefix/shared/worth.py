"""Which blocks of a row other workers can use, and whether sending them over a network pays.

A *near* tier is of this machine. It gets what rows of the batch share, for later batches, too. A
*far* tier crosses a network. By default it gets only what rows elsewhere begin with, if loading is
quicker than computing there. A prefix of a run that this worker has alone is of no use elsewhere.

Far tiers are looked up for what rows elsewhere begin with. Earlier batches may have left other
blocks there. These are looked up, too, until several such lookups in a row have found nothing;
then few of them are. Where loading does not pay, fewer still are, by time: each makes a row wait.
"""

from __future__ import annotations

import time

from batchkv_cache_store.keys import BLOCK_TOKENS
from batchkv_cache_store.store import Store
from batchkv_cache_store.uses import Uses
from batchkv_worker.sequence import Sequence

NEEDED, SHARED, ALL = "needed", "shared", "all"  # as the setting ``cache_write`` has it
MOST_EMPTY = 4  # lookups in a row that found nothing, for what only earlier batches may have left
TRY_EVERY = 16  # of what is not expected to pay or to be there, so many are one try
TRY_SECONDS = 2.0  # at least between two tries of what does not pay: a fast engine has many rows


class _Tries:
    """One of ``TRY_EVERY`` chances is a try, but not sooner than ``TRY_SECONDS`` after the last."""

    def __init__(self) -> None:
        self._num_chances = 0
        self._last = -TRY_SECONDS

    def is_next(self) -> bool:
        """Count a chance, and say whether it is a try."""
        self._num_chances += 1
        now = time.monotonic()
        if self._num_chances % TRY_EVERY or now < self._last + TRY_SECONDS:
            return False
        self._last = now
        return True


class Worth:
    """The policy of one engine. ``block_bytes``: of a block, all kinds together."""

    def __init__(self, store: Store, block_bytes: int, writes: str) -> None:
        self._store = store
        self._block_bytes = block_bytes
        self._writes = writes
        self._num_empty = 0
        self._num_unlikely = 0
        self._reads, self._writes_far = _Tries(), _Tries()  # of what does not pay
        self.uses: Uses[bytes] = Uses()  # of the rows that wait here

    def num_shared(self, row: Sequence, num_own: int = 0) -> int:
        """How many of a row's first blocks other rows begin with, here or elsewhere.

        ``num_own``: 1 while the row waits itself.
        """
        return self.uses.num_worth_writing(row.block_keys, row.num_common_blocks, num_own)

    def num_elsewhere(self, row: Sequence, num_own: int = 0) -> int:
        """How many of a row's first blocks rows of other workers may begin with."""
        num_shared = self.num_shared(row, num_own)
        if self._writes != NEEDED or row.num_elsewhere is None:
            return num_shared
        return min(num_shared, row.num_elsewhere // BLOCK_TOKENS)

    def pays(self, row: Sequence) -> bool | None:
        """Whether loading from a far tier is quicker than computing; None if it is not known."""
        if self._writes != NEEDED:
            return True
        return self._store.far_pays(BLOCK_TOKENS, self._block_bytes, row.slowdown)

    def far_seconds(self, num_bytes: int) -> float:
        """The expected time to load so many bytes and one block more from a far tier."""
        return self._store.far_seconds(num_bytes + self._block_bytes)

    def num_leased(self, row: Sequence) -> int:
        """How many of a waiting row's first blocks are written once they are computed."""
        if self._store.has_near or not self._store.has_far:
            return self.num_shared(row, num_own=1)
        return 0 if self.pays(row) is False else self.num_elsewhere(row, num_own=1)

    def is_for_far(self, row: Sequence, number: int) -> bool:
        """Whether this block of a row goes to far tiers, now that it is computed.

        If it does not pay, a first block goes there now and then: a slow network may be fast again.
        """
        if not self._store.has_far or number >= self.num_elsewhere(row):
            return False
        if self.pays(row) is not False:
            return True
        return number == 0 and self._writes_far.is_next()

    def may_be_far(self, row: Sequence, depth: int) -> bool:
        """Whether to look into far tiers for what follows a row's first ``depth`` blocks."""
        if not self._store.has_far:
            return False
        if self._writes == ALL:
            return True
        pays = self.pays(row)
        if depth < self.num_elsewhere(row, num_own=1) and pays is not False:
            return True
        if pays is False:
            return self._reads.is_next()
        self._num_unlikely += 1
        return self._num_empty < MOST_EMPTY or self._num_unlikely % TRY_EVERY == 0

    def note_lookup(self, *, has_found: bool) -> None:
        """A lookup in far tiers has ended."""
        self._num_empty = 0 if has_found else self._num_empty + 1
