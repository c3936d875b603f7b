"""Choose and remove what is stored: first all is chosen, then it is removed.

Two steps, since a choice may have to be taken back: a namespace that was named by its first digits
turns out to be two, or to be none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from batchkv_cache_store.errors import Reason
from batchkv_cache_store.tiers.base import Tier
from batchkv_cache_store.upkeep.contents import NAMES_AT_ONCE, Item, iter_items


class Why(StrEnum):
    """Why a block is chosen."""

    UNREADABLE = "unreadable"
    FORMAT = "format"  # of another version
    NAMESPACE = "namespace"


@dataclass(slots=True)
class Choice:
    """What was chosen in one tier. ``num_pinned``: would have been, but is pinned."""

    names: list[str] = field(default_factory=list)
    num_bytes: int = 0
    num_pinned: int = 0
    num_removed: int = 0
    counts: Counter[Why] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Rules:
    """``removes``: is everything of this namespace to go?"""

    removes: Callable[[bytes], bool]
    has_unreadable: bool = True
    has_other_formats: bool = False
    has_pinned: bool = False

    def why(self, item: Item) -> Why | None:
        """Why the item goes; None when it stays."""
        if item.reason is Reason.VERSION:
            return Why.FORMAT if self.has_other_formats else None
        if item.namespace is None:
            return Why.UNREADABLE if self.has_unreadable else None
        return Why.NAMESPACE if self.removes(item.namespace) else None


def choose(tier: Tier, rules: Rules, seen: set[bytes]) -> Choice:
    """What goes from a tier; every namespace that is met is added to ``seen``."""
    pinned = set() if rules.has_pinned else set(tier.pinned())
    choice = Choice()
    for item in iter_items(tier):
        if item.namespace is not None:
            seen.add(item.namespace)
        why = rules.why(item)
        if why is None:
            continue
        # A pin keeps what is of use to somebody.
        if why is not Why.UNREADABLE and item.entry.name in pinned:
            choice.num_pinned += 1
            continue
        choice.names.append(item.entry.name)
        choice.num_bytes += item.entry.num_bytes
        choice.counts[why] += 1
    return choice


def remove(tier: Tier, choice: Choice) -> None:
    """Remove what was chosen, its pins too; counts in ``num_removed``."""
    for start in range(0, len(choice.names), NAMES_AT_ONCE):
        names = choice.names[start : start + NAMES_AT_ONCE]
        tier.unpin(names)
        tier.delete_many(names)
        choice.num_removed += len(names)
