"""The scheduling policy: which waiting row is next, with which others, and when.

It was chosen by simulation (``tests/benchmarks/plan/bench_schedule.py``): a batch takes the time of
its decode steps, each as long however many slots are free, and of its chunks of prompts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from math import ceil, sqrt

from batchkv_worker.sequence import Sequence

LEAST_FREE = 16  # one slot of so many is free before others come in, if a chunk has room for them
MOST_OVERTAKEN = 32  # groups that may be formed before the group of the oldest row
URGENT = 0.8  # of the steps left: rows wait for chunks, too, so a row with so many may end last
EARLIER = 2  # pads, in tokens, that are accepted for each token by which a row is urgent


def steps_left(waiting: Iterable[Sequence], num_decoding: int, num_slots: int) -> float:
    """How many steps these waiting rows, and those that decode, need while no slot is free.

    ``num_decoding``: the tokens that rows in slots may still generate. With more rows waiting than
    are looked at, more steps are left, and fewer rows are urgent.
    """
    return (num_decoding + sum(row.num_remaining for row in waiting)) / num_slots


def next_row(waiting: Rows[Sequence], left: float) -> Sequence:
    """The row that is computed next: the oldest, or the longest if it would end last.

    ``waiting`` is in order of age, the oldest first; ``left`` are the ``steps_left``. A long row
    that starts last would decode alone in the end. So a row is urgent if it may generate nearly as
    many tokens as there are steps left. The oldest row is next in any case if it was begun before,
    or was overtaken MOST_OVERTAKEN times.
    """
    oldest = waiting[0]
    longest = max(waiting, key=lambda row: row.num_remaining)
    may_be_overtaken = not oldest.is_begun and oldest.num_overtaken < MOST_OVERTAKEN
    return longest if may_be_overtaken and urgency(longest, left) >= 0 else oldest


def in_turn(waiting: Rows[Sequence], left: float) -> list[Sequence]:
    """The row that is next, then the others by age; counts that the oldest was overtaken."""
    first = next_row(waiting, left)
    if first is not waiting[0]:
        waiting[0].pass_over()
    return [first, *(row for row in waiting if row is not first)]


def urgency(row: Sequence, left: float) -> float:
    """By how many tokens a row is urgent; negative for one that is not."""
    return row.num_remaining - URGENT * left


def most_alike(rows: Rows[Sequence], left: float) -> list[Sequence]:
    """The rows in the order in which they join the chunk of the first one.

    Prompts of similar length come first: all are padded to the longest. Urgent rows come earlier.
    """
    first, *others = rows

    def pads(row: Sequence) -> float:
        return abs(row.num_prefill - first.num_prefill) - EARLIER * max(0.0, urgency(row, left))

    return [first, *sorted(others, key=pads)]


def as_many_as_fit(rows: list[Sequence], fits: Callable[[list[Sequence]], bool]) -> list[Sequence]:
    """The first of these rows, as many as fit together. A row more must never take less memory.

    So mostly one question is enough. ``fits`` of the first row alone may make room for others.
    """
    if not rows or fits(rows):
        return rows
    if not fits(rows[:1]):
        return rows[:0]
    more = range(2, len(rows) + 1)
    return rows[: 1 + bisect_left(more, True, key=lambda count: not fits(rows[:count]))]


def free_slots(
    num_slots: int,
    chunk_steps: float,
    answer_tokens: float,
    rows_in_chunk: int,
    *,
    is_decoding: bool = True,
) -> int:
    """How many slots should be free before a chunk of prompts is computed for them.

    Rows end at a rate of ``num_slots / answer_tokens`` a step. While ``n`` slots are waited for,
    half of them are free on average, and a chunk costs ``chunk_steps`` besides its tokens. The sum
    of both losses is least at ``num_slots * sqrt(2 * chunk_steps / answer_tokens)``. It is flat
    there, so somewhat fewer are waited for, and never more than a quarter of the slots. A chunk
    that is full with ``rows_in_chunk`` prompts gains nothing from more free slots.

    Rows that have not decoded yet (``is_decoding`` is false) do not end soon. A slot that is left
    free then is free for ``answer_tokens`` steps, and ``n`` slots lose ``n / num_slots`` of their
    time. So fewer slots are enough, if they lose as much as a chunk costs: a step at least.
    """
    best = num_slots * sqrt(chunk_steps / max(1.0, answer_tokens))
    enough = max(1, num_slots // LEAST_FREE, min(round(best), num_slots // 4))
    if not is_decoding:
        enough = min(enough, ceil(num_slots * max(1.0, chunk_steps) / max(1.0, answer_tokens)))
    return min(enough, max(1, rows_in_chunk))
