"""Which blocks are worth keeping and writing, told by who still wants them.

A batch worker knows its next hundred jobs, and so, from their key chains (``keys.chain``), how
often each block will be wanted again. Two decisions follow:

- *To the shared store* goes what is wanted at least once more when it is computed. Of a production
  trace in prefix order that is a quarter of the blocks, and no hit that other workers could have
  had is lost but at the ends of runs; writing on the second touch, as caches do that know no
  future, would write next to nothing and lose what a small memory has dropped by then.
- *Local memory* gives up what nobody in sight wants first, the least recently used of it, and only
  then what is wanted; within one prompt always the deeper block, which is of no use without those
  before it.

Pure: no I/O, no clock, no threads. Keys are any hashable values, chains are in prompt order; a key
names its whole prefix, so equal keys have equal predecessors. A block's uses are therefore never
fewer than those of the blocks behind it, and what ``worth_writing`` lets through is a prefix.

How a worker is to use it: one ``Uses`` beside the prefix memory, on the engine's thread.
``add(chain)`` when a job is pulled (its prompt must be tokenized then: the backlog too, not only
the rows that wait in the engine); ``remove(chain)`` when its prompt is computed, or when it is
canceled or given back; ``worth_writing`` where computed blocks are handed to the writer;
``Kept.touch`` where memory is filled or read, deleting what it returns; ``Kept.settle`` after each
``add`` and ``remove``.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Uses(Generic[Key]):
    """How many waiting jobs want each block. Memory is that of their chains' distinct keys."""

    def __init__(self) -> None:
        self._counts: Counter[Key] = Counter()

    def __len__(self) -> int:
        """How many blocks are wanted by somebody."""
        return len(self._counts)

    def add(self, chain: Iterable[Key]) -> None:
        """One more waiting job wants these blocks, each once."""
        self._counts.update(chain)

    def remove(self, chain: Iterable[Key]) -> None:
        """One job less. Raises KeyError for a block that nobody wanted: a job left twice."""
        for key in chain:
            left = self._counts.get(key, 0) - 1
            if left < 0:
                raise KeyError(key)
            if left:
                self._counts[key] = left
            else:
                del self._counts[key]

    def remaining(self, key: Key) -> int:
        """How many waiting jobs want a block."""
        return self._counts.get(key, 0)

    def worth_writing(self, computed: Sequence[Key]) -> Sequence[Key]:
        """Those first of these blocks that somebody still wants.

        ``computed`` are blocks of one prompt in order, just computed; its own job was removed
        before, or it would count as one that comes.
        """
        for index, key in enumerate(computed):
            if not self.remaining(key):
                return computed[:index]
        return computed


class Kept(Generic[Key]):
    """Which blocks a memory of ``max_blocks`` keeps; the blocks themselves are the caller's.

    Every operation takes time by the chain it is given, none by what is kept.
    """

    def __init__(self, uses: Uses[Key], max_blocks: int) -> None:
        if max_blocks < 0:
            raise ValueError(f"a memory holds no {max_blocks} blocks")
        self._uses = uses
        self._max_blocks = max_blocks
        # Both in the order of last use, the oldest first.
        self._unwanted: OrderedDict[Key, None] = OrderedDict()
        self._wanted: OrderedDict[Key, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._unwanted) + len(self._wanted)

    def __contains__(self, key: Key) -> bool:
        return key in self._wanted or key in self._unwanted

    def num_held(self, chain: Iterable[Key]) -> int:
        """How many of a chain's first blocks are kept, up to the first that is not."""
        count = 0
        for key in chain:
            if key not in self:
                break
            count += 1
        return count

    def touch(self, chain: Sequence[Key]) -> list[Key]:
        """These blocks were used or have come: keep them; returns those that have to go.

        Of a chain longer than the memory the first blocks stay.
        """
        for key in reversed(chain):  # so that the first block is the last to go
            self._unwanted.pop(key, None)
            self._wanted.pop(key, None)
            self._place(key)
        gone = []
        while len(self) > self._max_blocks:
            oldest, _ = (self._unwanted or self._wanted).popitem(last=False)
            gone.append(oldest)
        return gone

    def settle(self, chain: Iterable[Key]) -> None:
        """The uses of these blocks have changed: sort them anew into wanted and unwanted ones."""
        for key in reversed(list(chain)):
            is_wanted = self._uses.remaining(key) > 0
            source = self._unwanted if is_wanted else self._wanted
            if key in source:
                del source[key]
                self._place(key)

    def _place(self, key: Key) -> None:
        (self._wanted if self._uses.remaining(key) else self._unwanted)[key] = None
