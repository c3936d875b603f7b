"""The scheduling policy: the order in which waiting rows are considered."""

from __future__ import annotations

from batchkv_worker.sequence import Sequence

FEWEST_ALIKE = 64  # rows at least among which rows of similar length are chosen
MOST_OVERTAKEN = 32  # groups that may be formed before the group of the oldest row


def longest_first(waiting: list[Sequence], num_slots: int) -> list[Sequence]:
    """The waiting rows that may generate most, up to twice as many as there are slots.

    ``waiting`` is in order of age, the oldest first. A long row that starts last would decode alone
    in the end. Rows with the same ``max_tokens`` keep their order. The oldest row comes first if it
    was begun before, or was overtaken MOST_OVERTAKEN times.
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
