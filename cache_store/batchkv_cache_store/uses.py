"""Decides which blocks to keep and to write, by the rows that still need them.

The rows to come are known in two ways.

- *Exactly*, by key, for the rows that wait in the engine: their prompts are tokenized (``Uses``).
- *As a number*, for all other rows of the batch. The producer sorts the rows by their text. So it
  knows how much of a row's text another row begins with, and stores that number with each job
  (``order.with_shared``; some ten bytes). A worker converts it to tokens, counted from the end of
  the prompt (``requests``). The result may be too low by a thousand tokens for a shared document
  of more than four thousand. The uses by rows of the same worker are still exact.

Because of this number the backlog is not tokenized ahead. Tokenizing would give exact uses for the
next hundred rows only, not for the rest of the queue or the rows of other workers. Near the end of
a queue, where workers take single rows, every worker would then compute every prefix. In prefix
order those hundred rows made no difference to the memory either. Two decisions follow.

- *The shared store* gets the first part of a prompt that another row of the batch, or another row
  that waits here, begins with (``num_worth_writing``). In a production trace that is 24 % of the
  blocks, and no possible hit of another row was lost. A later batch finds the blocks that rows of
  this batch shared: system prompts, documents, examples; not the ends of single prompts.
- *Local memory* first evicts blocks that no known row needs, and then the least recently used of
  the blocks that waiting rows need. In one prompt the deeper block goes first, because it is of no
  use without the blocks before it. The ends of prompts that no other row begins with go before all
  others (``EvictionOrder.demote``).

Pure: no I/O, no clock, no threads. Keys are any hashable values. Chains are in prompt order. A key
names its whole prefix, so equal keys have equal predecessors. So a block has at least as many uses
as the blocks after it, and the blocks to write are always the first part of a chain.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Uses(Generic[Key]):
    """Counts the waiting rows that need each block; it stores each distinct key once."""

    def __init__(self) -> None:
        self._counts: Counter[Key] = Counter()

    def __len__(self) -> int:
        """The number of blocks that a waiting row needs."""
        return len(self._counts)

    def add(self, chain: Sequence[Key]) -> None:
        """Add a waiting row that needs these blocks, each once."""
        self._counts.update(chain)

    def remove(self, chain: Sequence[Key]) -> None:
        """Remove a row. Raises KeyError for a block without uses: the row was removed twice."""
        for key in chain:
            left = self._counts.get(key, 0) - 1
            if left < 0:
                raise KeyError(key)
            if left:
                self._counts[key] = left
            else:
                del self._counts[key]

    def remaining(self, key: Key) -> int:
        """The number of waiting rows that need a block."""
        return self._counts.get(key, 0)

    def num_worth_writing(
        self, chain: Sequence[Key], num_shared: int | None, num_own: int = 0
    ) -> int:
        """The number of a prompt's first blocks that other rows can use.

        ``num_shared``: blocks that another row of the batch begins with. None is unknown, and all
        blocks count. ``num_own``: 1 while the row itself is among the waiting rows.
        """
        if num_shared is None:
            return len(chain)
        number = min(num_shared, len(chain))
        while number < len(chain) and self.remaining(chain[number]) > num_own:
            number += 1
        return number


class EvictionOrder(Uses[Key]):
    """The order in which a memory evicts its blocks. The caller holds the blocks and counts bytes.

    The time of an operation depends on the length of its chain, never on the number of blocks.
    """

    def __init__(self) -> None:
        super().__init__()
        # Both are in the order of last use, the oldest first.
        self._unwanted: OrderedDict[Key, None] = OrderedDict()
        self._wanted: OrderedDict[Key, None] = OrderedDict()

    @property
    def num_kept(self) -> int:
        return len(self._unwanted) + len(self._wanted)

    def has(self, key: Key) -> bool:
        """Whether a block is in the order."""
        return key in self._wanted or key in self._unwanted

    def num_held(self, chain: Iterable[Key]) -> int:
        """The number of a chain's first blocks that are in the order, up to the first gap."""
        count = 0
        for key in chain:
            if not self.has(key):
                break
            count += 1
        return count

    def add(self, chain: Sequence[Key]) -> None:
        super().add(chain)
        self._reorder(chain)

    def remove(self, chain: Sequence[Key]) -> None:
        super().remove(chain)
        self._reorder(chain)

    def touch(self, chain: Sequence[Key]) -> None:
        """Make these blocks, new or used again, the last of their kind to be evicted."""
        for key in reversed(chain):  # the first block is evicted last
            self.discard(key)
            self._place(key)

    def demote(self, chain: Sequence[Key]) -> None:
        """Make these blocks the first to be evicted, the deepest first: no row will need them."""
        for key in chain:
            if key in self._unwanted:
                self._unwanted.move_to_end(key, last=False)

    def discard(self, key: Key) -> None:
        """Remove a block, if it is in the order."""
        self._unwanted.pop(key, None)
        self._wanted.pop(key, None)

    def forget(self, key: Key) -> None:
        """Remove a block and all its uses."""
        while self.remaining(key):
            self.remove([key])
        self.discard(key)

    def pop(self) -> Key:
        """Remove and return the block to evict next. Raises KeyError when there is none."""
        return (self._unwanted or self._wanted).popitem(last=False)[0]

    def clear(self) -> None:
        """Remove all blocks, but not their uses."""
        self._unwanted.clear()
        self._wanted.clear()

    def _reorder(self, chain: Sequence[Key]) -> None:
        """Sort these blocks again into wanted and unwanted ones, after their uses have changed."""
        for key in reversed(chain):
            source = self._unwanted if self.remaining(key) else self._wanted
            if key in source:
                del source[key]
                self._place(key)

    def _place(self, key: Key) -> None:
        (self._wanted if self.remaining(key) else self._unwanted)[key] = None
