"""Whose turn it is among rows that wait."""

from __future__ import annotations

from batchkv_worker.sequence import Sequence

FEWEST_ALIKE = 64  # rows at least among which rows of like length are sought
MOST_OVERTAKEN = 32  # groups that may be formed before the oldest row's


def longest_first(waiting: list[Sequence], num_slots: int) -> list[Sequence]:
    """Of rows that wait, oldest first, those that may generate most: twice as many as slots.

    Started last, a long row would decode alone in the end. Rows that ask for equally much keep
    their order; one that was begun, or that others have overtaken often enough, comes before all.
    """
    oldest = waiting[0]
    if oldest.is_begun:
        return waiting
    found = sorted(waiting, key=lambda row: -row.num_remaining)
    if oldest is not found[0]:
        oldest.pass_over()
        if oldest.num_overtaken > MOST_OVERTAKEN:
            found.remove(oldest)
            found.insert(0, oldest)
    return found[: max(2 * num_slots, FEWEST_ALIKE)]
