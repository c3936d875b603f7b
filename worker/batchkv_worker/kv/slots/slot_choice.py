"""How much neighbouring rows differ, in shared prefixes and length: the cost of a placement."""

from __future__ import annotations

from collections.abc import Sequence

_APART = 1 << 32  # cost of another prefix: more than any row has tokens
Ranks = tuple[int, ...]  # of the shared prefixes that a row reads
Line = tuple[Ranks, int]  # and its length


def placement_cost(lines: Sequence[Line | None], slot: int, new: Line) -> int:
    """The tokens by which a row in ``slot`` adds to the differences between rows in use."""
    before = next((line for line in reversed(lines[:slot]) if line is not None), None)
    after = next((line for line in lines[slot + 1 :] if line is not None), None)
    if before is None or after is None:
        known = before or after
        return 0 if known is None else _difference(new, known)
    return _difference(new, before) + _difference(new, after) - _difference(before, after)


def _difference(one: Line, other: Line) -> int:
    """By how much two rows differ in length, and by how many prefixes, of the longer chain."""
    same = len({*one[0]} & {*other[0]})
    return abs(one[1] - other[1]) + _APART * (max(len(one[0]), len(other[0])) - same)
