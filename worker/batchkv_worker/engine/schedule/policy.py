"""The scheduling policy: which waiting rows are considered, and how many slots they wait for."""

from __future__ import annotations

from math import sqrt

from batchkv_worker.sequence import Sequence

LEAST_FREE = 16  # one slot of so many is free at least before others come in
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


def free_slots(num_slots: int, chunk_steps: float, answer_tokens: float) -> int:
    """How many slots should be free before a chunk of prompts is computed for them.

    Rows end at a rate of ``num_slots / answer_tokens`` a step. While ``n`` slots are waited for,
    half of them are free on average, and a chunk costs ``chunk_steps`` besides its tokens. The sum
    of both losses is least at ``num_slots * sqrt(2 * chunk_steps / answer_tokens)``. It is flat
    there, so somewhat fewer are waited for, and never more than a quarter of the slots.
    """
    best = num_slots * sqrt(chunk_steps / max(1.0, answer_tokens))
    return max(1, num_slots // LEAST_FREE, min(round(best), num_slots // 4))
