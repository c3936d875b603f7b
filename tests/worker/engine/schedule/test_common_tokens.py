"""Rows of one group start after the same number of tokens; those with common tokens wait."""

from __future__ import annotations

import random

from batchkv_cache_store.keys import root_key
from batchkv_cache_store.uses import Uses
from batchkv_worker.engine.schedule.common_tokens import Leaders, start_together
from batchkv_worker.engine.schedule.scheduler import Budget, Scheduler
from batchkv_worker.kv.slots.layouts import Costs, SlotLayouts
from batchkv_worker.prefix.partial_blocks import partial_keys
from batchkv_worker.sequence import Generation, Sequence

CHUNK = 2048


def found(*cached: int, length: int = 700) -> list[Sequence]:
    """Rows that have found so many cached tokens, the first one the next to be computed."""
    rows = [Sequence(str(n), [0] * (length + 1), Generation(10)) for n in range(len(cached))]
    for row, number in zip(rows, cached, strict=True):
        row.num_cached = number
    return rows


def names(rows: list[Sequence]) -> str:
    return "".join(row.job_id for row in rows)


def test_rows_that_found_the_same_start_there() -> None:
    """The usual case: all rows behind one prefix."""
    rows = start_together(found(576, 576, 576), 16, CHUNK)
    assert names(rows) == "012" and {row.num_cached for row in rows} == {576}


def test_one_row_with_more_does_not_go_alone() -> None:
    """It computes a few tokens again rather than making a pass of its own."""
    rows = start_together(found(640, 576, 576, 576), 16, CHUNK)
    assert names(rows) == "0123" and {row.num_cached for row in rows} == {576}


def test_a_row_that_found_less_waits_if_the_others_save_more_than_a_pass() -> None:
    """Two rows without partial blocks would make seven compute 192 tokens each again."""
    rows = start_together(found(*[704] * 7, 512, 512, length=900), 16, 4 * CHUNK)
    assert names(rows) == "012345678" and rows[0].num_cached == 512  # a pass costs more there
    rows = start_together(found(*[704] * 7, 512, 512, length=900), 16, CHUNK)
    assert names(rows) == "0123456" and rows[0].num_cached == 704


def test_nobody_waits_if_the_slots_are_full_anyway() -> None:
    """Of forty rows with 576 tokens and three with 640, sixteen of the forty fill the slots."""
    rows = start_together(found(*[640] * 3, *[576] * 40), 16, CHUNK)
    assert rows[0].num_cached == 576 and len(rows) == 43


def test_no_more_rows_count_than_slots_and_chunk_have_room_for() -> None:
    """Many rows that found less are of no use if few of them can come."""
    rows = start_together(found(*[640] * 4, *[576] * 40), 4, CHUNK)
    assert len(rows) == 4 and rows[0].num_cached == 640
    rows = start_together(found(*[640] * 14, *[576] * 40), 60, CHUNK)  # 16 in a chunk
    assert len(rows) == 14 and rows[0].num_cached == 640


def test_the_next_row_is_always_in_its_group() -> None:
    """With fewer tokens than all others, too: they compute so much again as a pass is worth."""
    rows = start_together(found(512, *[704] * 5), 16, CHUNK)
    assert rows[0].job_id == "0" and rows[0].num_cached == 512
    assert len(rows) == 1 + CHUNK // 4 // 192  # two of the five


def test_the_next_row_is_in_its_group_with_small_chunks_too() -> None:
    """What it computes again alone may be more than a pass of a small chunk is worth."""
    rows = start_together(found(128, *[64] * 8, length=128), 16, 128)
    assert rows[0].job_id == "0"


def test_random_rows_start_together() -> None:
    """Whatever they found: all of a group alike, none after more than it found, the first in it."""
    rng = random.Random(5)
    for _ in range(300):
        count = rng.randrange(1, 30)
        rows = found(*(512 + 16 * rng.randrange(16) for _ in range(count)), length=800)
        before = {row.job_id: row.num_cached for row in rows}
        group = start_together(rows, rng.randrange(0, 20), rng.choice([128, 320, 2048]))
        assert group[0] is rows[0]
        assert len({row.num_cached for row in group}) == 1
        assert all(row.num_cached <= before[row.job_id] for row in group)
        left = [row for row in rows if row not in group]
        assert all(row.num_cached == before[row.job_id] for row in left)


def waiting(count: int, common: int, own: int = 40) -> tuple[list[Sequence], Uses[bytes]]:
    """Rows behind the same tokens, with nothing in memory yet, and how many begin with what."""
    uses, rows = Uses[bytes](), []
    for index in range(count):
        tokens = [*range(common), *(1000 + index for _ in range(own))]
        row = Sequence(str(index), tokens, Generation(10))
        row.partial_keys = partial_keys(root_key(b""), tokens[:-1])
        uses.add(row.partial_keys)
        rows.append(row)
    return rows, uses


def test_rows_wait_for_the_first_of_them_if_that_is_worth_a_pass() -> None:
    """128 tokens of 16 rows are; those of 5 rows, or of 16 rows of which 4 have room, are not.

    The first of five computes them in any case, and the other four have as many as a pass.
    """
    for count, room, waits in ((16, 16, True), (6, 6, True), (5, 16, False), (16, 4, False)):
        rows, uses = waiting(count, 140)
        leaders = Leaders(room, CHUNK, uses.remaining)
        assert not leaders.precede(rows[0])
        leaders.add(rows[0])
        assert leaders.precede(rows[1]) is waits, (count, room)


def test_rows_wait_for_the_next_partial_block_alone() -> None:
    """After it they may differ at once."""
    rows, uses = waiting(16, 100)
    leaders = Leaders(16, CHUNK, uses.remaining)
    leaders.add(rows[0])
    assert leaders.precede(rows[1])


def test_only_what_most_of_the_rows_have_in_common_counts() -> None:
    """Nine rows have 64 tokens in common, which is not worth a pass; two of them have 192."""
    (first, second), uses = waiting(2, 200)
    for row in waiting(7, 64)[0]:
        uses.add(row.partial_keys[:4])
    leaders = Leaders(16, CHUNK, uses.remaining)
    leaders.add(first)
    assert uses.remaining(first.partial_keys[0]) == 9 and not leaders.precede(second)


def test_rows_wait_for_their_next_whole_block() -> None:
    """However few they are: a block is computed once."""
    first, second = found(0, 0)
    first.block_keys, second.block_keys = [b"one", b"two"], [b"one", b"other"]
    leaders = Leaders(16, CHUNK, Uses[bytes]().remaining)
    assert not leaders.precede(first)
    leaders.add(first)
    assert leaders.precede(second)
    second.num_cached = 256
    assert not leaders.precede(second)


def test_rows_do_not_wait_for_what_is_in_memory() -> None:
    """After the common tokens they differ at once."""
    rows, uses = waiting(16, 150)
    for row in rows:
        row.num_cached = 128
    leaders = Leaders(16, CHUNK, uses.remaining)
    leaders.add(rows[0])
    assert not leaders.precede(rows[1])


def test_the_scheduler_computes_common_tokens_once() -> None:
    """Sixteen prompts of 190 tokens: one alone, then the others behind its first 128."""
    rows, _uses = waiting(16, 150)
    memory: set[bytes] = set()

    def num_cached(row: Sequence) -> int:
        return 16 * sum(key in memory for key in row.partial_keys[:8])

    plan = Scheduler(SlotLayouts(16), Budget(CHUNK, 10**9, Costs(1)), num_cached)
    for row in rows:
        plan.add(row)
    first = plan.next_group()
    assert first is not None and names(first.rows) == "0" and first.position == 0
    memory.update(rows[0].partial_keys)
    first.advance(first.width)
    plan.finish_group()
    second = plan.next_group()
    assert second is not None and len(second.rows) == 15 and second.position == 128


def group_of(*cached: int) -> tuple[str, int]:
    """The names of the first group's rows, and where they start, if rows found so many tokens."""
    rows = found(*cached)
    plan = Scheduler(
        *(SlotLayouts(16), Budget(CHUNK, 10**9, Costs(1)), lambda row: cached[int(row.job_id)])
    )
    for row in rows:
        plan.add(row)
    group = plan.next_group()
    assert group is not None and {row.num_cached for row in group.rows} == {group.position}
    return names(group.rows), group.position


def test_a_group_starts_after_what_all_of_its_rows_have_found() -> None:
    """With rows that found fewer partial blocks than the first; without any of other blocks."""
    assert group_of(640, 576, 576, 256) == ("012", 576)
    assert group_of(320, 576, 320) == ("02", 320)
