"""Which blocks are worth keeping and writing, told by who still wants them.

A batch worker need not guess: the queue's future is known, in two ways.

- *Exactly*, by key, for the rows that wait in the engine: their prompts are tokenized (``Uses``).
- *As a number*, for all others of the batch, wherever they are: the producer sorts the rows by
  their text, so it knows how much of a row's text any other row begins with, and says it with each
  job (``order.with_shared``; some ten bytes). A worker counts what of the prompt that is in tokens,
  from its end (``requests``). It may be short by a thousand tokens of a shared document of more
  than four thousand; what of that rows here want is known exactly all the same.

The number is why the backlog is not tokenized ahead: that would tell exactly what the next hundred
rows want, but nothing of the rest of the queue and of other workers' rows; and near the end of a
queue, where workers take single rows, every prefix would be computed by every worker. For what
memory keeps, those hundred rows were worth nothing either, in prefix order. Two decisions follow:

- *To the shared store* goes the first part of a prompt that another row of the batch, or of those
  that wait here, begins with (``num_worth_writing``). Of a production trace that is 24 % of the
  blocks, and no hit that others could have had is lost. A batch that comes later finds what this
  one shared within itself: system prompts, documents, examples; not the ends of single prompts.
- *Local memory* gives up first what nobody is known to want, then the least recently used of what
  waiting rows want; within one prompt always the deeper block, which is of no use without those
  before it. The ends of prompts that nobody else begins with go before all
  (``EvictionOrder.leave``).

Pure: no I/O, no clock, no threads. Keys are any hashable values, chains are in prompt order; a key
names its whole prefix, so equal keys have equal predecessors. A block's uses are therefore never
fewer than those of the blocks behind it, and what is worth writing is the first part of a chain.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Uses(Generic[Key]):
    """How many waiting rows want each block. Memory is that of their chains' distinct keys."""

    def __init__(self) -> None:
        self._counts: Counter[Key] = Counter()

    def __len__(self) -> int:
        """How many blocks are wanted by somebody."""
        return len(self._counts)

    def add(self, chain: Sequence[Key]) -> None:
        """One more waiting row wants these blocks, each once."""
        self._counts.update(chain)

    def remove(self, chain: Sequence[Key]) -> None:
        """One row less. Raises KeyError for a block that nobody wanted: a row left twice."""
        for key in chain:
            left = self._counts.get(key, 0) - 1
            if left < 0:
                raise KeyError(key)
            if left:
                self._counts[key] = left
            else:
                del self._counts[key]

    def remaining(self, key: Key) -> int:
        """How many waiting rows want a block."""
        return self._counts.get(key, 0)

    def num_worth_writing(
        self, chain: Sequence[Key], num_shared: int | None, num_own: int = 0
    ) -> int:
        """How many of a prompt's first blocks others can use.

        ``num_shared``: blocks that another row of the batch begins with, None when nobody knows:
        then it is all of them. ``num_own``: 1 while the row itself still waits.
        """
        if num_shared is None:
            return len(chain)
        number = min(num_shared, len(chain))
        while number < len(chain) and self.remaining(chain[number]) > num_own:
            number += 1
        return number


class EvictionOrder(Uses[Key]):
    """The order in which a memory gives up its blocks; the caller has the blocks and counts bytes.

    Every operation takes time by the chain it is given, none by what is kept.
    """

    def __init__(self) -> None:
        super().__init__()
        # Both in the order of last use, the oldest first.
        self._unwanted: OrderedDict[Key, None] = OrderedDict()
        self._wanted: OrderedDict[Key, None] = OrderedDict()

    @property
    def num_kept(self) -> int:
        return len(self._unwanted) + len(self._wanted)

    def has(self, key: Key) -> bool:
        """Whether a block is kept."""
        return key in self._wanted or key in self._unwanted

    def num_held(self, chain: Iterable[Key]) -> int:
        """How many of a chain's first blocks are kept, up to the first that is not."""
        count = 0
        for key in chain:
            if not self.has(key):
                break
            count += 1
        return count

    def add(self, chain: Sequence[Key]) -> None:
        super().add(chain)
        self._settle(chain)

    def remove(self, chain: Sequence[Key]) -> None:
        super().remove(chain)
        self._settle(chain)

    def touch(self, chain: Sequence[Key]) -> None:
        """These blocks were used or have come: of their kind they are the last to go."""
        for key in reversed(chain):  # so that the first block is the last to go
            self.discard(key)
            self._place(key)

    def leave(self, chain: Sequence[Key]) -> None:
        """Nobody in the batch comes to want these: they are the first to go, the deepest first."""
        for key in chain:
            if key in self._unwanted:
                self._unwanted.move_to_end(key, last=False)

    def discard(self, key: Key) -> None:
        """A block is gone, if it was kept."""
        self._unwanted.pop(key, None)
        self._wanted.pop(key, None)

    def forget(self, key: Key) -> None:
        """A block is gone, and whoever wanted it."""
        while self.remaining(key):
            self.remove([key])
        self.discard(key)

    def give_up(self) -> Key:
        """The block that has to go next, kept no longer. Raises KeyError when there is none."""
        return (self._unwanted or self._wanted).popitem(last=False)[0]

    def drop(self) -> None:
        """All blocks are gone; rows want what they want."""
        self._unwanted.clear()
        self._wanted.clear()

    def _settle(self, chain: Sequence[Key]) -> None:
        """The uses of these blocks have changed: sort them anew into wanted and unwanted ones."""
        for key in reversed(chain):
            source = self._unwanted if self.remaining(key) else self._wanted
            if key in source:
                del source[key]
                self._place(key)

    def _place(self, key: Key) -> None:
        (self._wanted if self.remaining(key) else self._unwanted)[key] = None
