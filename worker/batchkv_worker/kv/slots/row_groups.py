"""Cuts rows in neighbouring slots into groups, which attention reads one by one."""

from __future__ import annotations

MAX_GROUPS = 8


def cut(lengths: list[int], group_cost: int, multiple: int = 1) -> list[int]:
    """Where to cut rows of these lengths into groups; each group reads its longest row's cells.

    Greedy: the cut that saves most cells first, as long as it saves more than ``group_cost``. Cuts
    are at multiples of ``multiple`` rows.
    """
    cuts: list[int] = []
    parts = [(0, len(lengths))]
    while len(cuts) < MAX_GROUPS - 1:
        saved, place, part = max((*_best_cut(lengths, p, multiple), p) for p in parts)
        if saved <= group_cost:
            break
        first, last = part
        parts.remove(part)
        parts += [(first, place), (place, last)]
        cuts.append(place)
    return sorted(cuts)


def _best_cut(lengths: list[int], part: tuple[int, int], multiple: int) -> tuple[int, int]:
    """(cells saved, place) of the best single cut within rows [first, last)."""
    first, last = part
    rows = lengths[first:last]
    if len(rows) < 2:
        return 0, first
    whole = max(rows) * len(rows)
    after = [0] * (len(rows) + 1)  # the longest of the rows from this place on
    for index in reversed(range(len(rows))):
        after[index] = max(after[index + 1], rows[index])
    best, before = (0, first), 0
    for index in range(1, len(rows)):
        before = max(before, rows[index - 1])
        if (first + index) % multiple:
            continue
        saved = whole - before * index - after[index] * (len(rows) - index)
        best = max(best, (saved, first + index))
    return best
