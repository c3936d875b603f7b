"""Chooses blocks by rules, and then removes them.

These are two steps, because a choice may turn out wrong: the first digits of a namespace may match
two namespaces, or none.
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
    """Why a block was chosen."""

    UNREADABLE = "unreadable"
    FORMAT = "format"  # of another version
    NAMESPACE = "namespace"


@dataclass(slots=True)
class Choice:
    """The names chosen in one tier. ``num_pinned``: blocks that stay because they are pinned."""

    names: list[str] = field(default_factory=list)
    num_bytes: int = 0
    num_pinned: int = 0
    num_removed: int = 0
    counts: Counter[Why] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Rules:
    """Which objects to choose. ``removes``: whether to choose all blocks of a namespace."""

    removes: Callable[[bytes], bool]
    has_unreadable: bool = True
    has_other_formats: bool = False
    has_pinned: bool = False

    def why(self, item: Item) -> Why | None:
        """Why the item is chosen; None if it stays."""
        if item.reason is Reason.VERSION:
            return Why.FORMAT if self.has_other_formats else None
        if item.namespace is None:
            return Why.UNREADABLE if self.has_unreadable else None
        return Why.NAMESPACE if self.removes(item.namespace) else None


def choose(tier: Tier, rules: Rules, seen: set[bytes]) -> Choice:
    """Choose names in a tier. All namespaces that it holds are added to ``seen``."""
    pinned = set() if rules.has_pinned else set(tier.pinned())
    choice = Choice()
    for item in iter_items(tier):
        if item.namespace is not None:
            seen.add(item.namespace)
        why = rules.why(item)
        if why is None:
            continue
        # A pin does not protect a block that no one can read.
        if why is not Why.UNREADABLE and item.entry.name in pinned:
            choice.num_pinned += 1
            continue
        choice.names.append(item.entry.name)
        choice.num_bytes += item.entry.num_bytes
        choice.counts[why] += 1
    return choice


def remove(tier: Tier, choice: Choice) -> None:
    """Remove the chosen names and their pins, and count them in ``num_removed``."""
    for start in range(0, len(choice.names), NAMES_AT_ONCE):
        names = choice.names[start : start + NAMES_AT_ONCE]
        tier.unpin(names)
        tier.delete_many(names)
        choice.num_removed += len(names)
