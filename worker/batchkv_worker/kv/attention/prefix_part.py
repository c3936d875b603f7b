"""One part of a chain of shared prefixes, without its arrays: all that scheduling needs to know."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Self

_ranks = count(1)


@dataclass(slots=True, eq=False, weakref_slot=True)
class PrefixPart:
    """The tokens after ``parent`` up to the end of the block ``key``.

    ``num_tokens`` are those of the whole chain. ``rank`` orders parts among each other.
    """

    key: bytes
    num_tokens: int
    parent: Self | None = None
    rank: int = field(default_factory=lambda: next(_ranks), kw_only=True)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of its chain."""
        return tuple(part.rank for part in self.chain)

    @property
    def chain(self) -> list[Self]:
        """Its parents, the first of them first, and itself."""
        return [*(self.parent.chain if self.parent else []), self]

    @property
    def num_own(self) -> int:
        """Tokens that it holds itself."""
        return self.num_tokens - (self.parent.num_tokens if self.parent else 0)
