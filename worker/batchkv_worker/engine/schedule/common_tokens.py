"""How many cached tokens the rows of one group start after, and which wait for each other's tokens.

Prompts that part within a block have partial blocks in common (``prefix``). Some rows
of a group may have found more of them than others, but all start after the same number of tokens.
No tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows

from batchkv_cache_store.keys import BLOCK_TOKENS
from batchkv_worker.engine.schedule.prefix_split import SplitPoints, key_at, num_shared
from batchkv_worker.prefix.partial_blocks import PARTIAL_TOKENS
from batchkv_worker.sequence import Sequence

COMMON_END = 64  # rows behind different prefixes start together after a multiple of so many tokens
PASS_SHARE = 4  # of a chunk: a pass of fewer tokens costs about as much as one of so many


def with_the_first(rows: Rows[Sequence], shared: int, *, is_ragged: bool) -> list[Sequence]:
    """The rows that one group may have with the first, which have as many cached blocks.

    ``shared``: tokens of its prefix, if it has one. Each row needs a token of its own after them.
    Unless ``is_ragged`` prompts are equally long.
    """
    first = rows[0]
    return [
        row
        for row in rows
        if row.num_cached // BLOCK_TOKENS == first.num_cached // BLOCK_TOKENS
        and not row.parked
        and (is_ragged or row.num_prefill == first.num_prefill)
        and (not shared or row.num_prefill > shared)
    ]


def start_together(rows: Rows[Sequence], room: int, chunk_tokens: int) -> list[Sequence]:
    """Which of these rows one group may have, with the same ``num_cached``; the first is in it.

    The rows have the same number of cached blocks. One with fewer partial blocks than the group
    starts after is left out. One with more computes them again, if that is not too much in all.
    ``room`` is how many rows could have a slot. The number is chosen that saves most tokens. That
    fewer rows come into the group than could costs another pass.
    """
    first = rows[0].num_cached
    pass_tokens = chunk_tokens // PASS_SHARE
    choices = []
    for cached in {row.num_cached for row in rows if row.num_cached <= first}:
        fits = max(1, chunk_tokens // max(1, rows[0].num_prefill - cached))
        choices.append((cached, _starting_after(cached, rows, pass_tokens), min(room, fits)))
    most = max(min(len(found), limit) for _, found, limit in choices)

    def saved(choice: tuple[int, list[Sequence], int]) -> tuple[int, int]:
        cached, found, limit = choice
        num_rows = min(len(found), limit)
        return num_rows * (cached % BLOCK_TOKENS) - pass_tokens * (num_rows < most), cached

    cached, found, _ = max(choices, key=saved)
    return all_after(cached, found)


def all_after(cached: int, rows: list[Sequence]) -> list[Sequence]:
    """The rows, which start after so many cached tokens from now on."""
    for row in rows:
        row.num_cached = cached
    return rows


def behind_others(
    rows: Rows[Sequence],
    alike: Rows[Sequence],
    split_points: Callable[[Sequence, int], SplitPoints],
    chunk_tokens: int,
    room: int,
    joined: int,
) -> tuple[int, list[Sequence]]:
    """Rows behind other shared prefixes that are computed in one chunk with ``rows``; none: alone.

    Also how many cached tokens all of these start after. Each has a shared prefix of so many, as
    ``split_points`` says, and ``rows`` have one of these prefixes. They are not alone if a pass for
    them costs as much as one of more tokens, and others have ``room`` beside them. At most
    ``joined`` tokens are in the chunk, cached ones included. If more rows can be computed so, they
    compute their last cached tokens again, after a multiple of COMMON_END.
    """
    first, num_own = rows[0].num_cached, rows[0].num_prefill - rows[0].num_cached
    if not joined or len(rows) >= room or not 0 < len(rows) * num_own < chunk_tokens // PASS_SHARE:
        return first, []
    start, most = first, list[Sequence]()
    for shared in dict.fromkeys((first, first - first % COMMON_END)):
        found = _behind(shared, alike, split_points, room)
        if found and found[0] is rows[0]:
            found = found[: joined // max(row.num_prefill for row in found)]
            if len(found) > max(len(most), len(rows)):
                start, most = shared, found
    return start, most


def _behind(
    shared: int,
    alike: Rows[Sequence],
    split_points: Callable[[Sequence, int], SplitPoints],
    room: int,
) -> list[Sequence]:
    """Up to ``room`` rows of which each has a shared prefix of ``shared`` tokens."""
    ends: dict[bytes | None, int] = {}
    found: list[Sequence] = []
    for row in alike:
        if len(found) == room:  # the points of more prefixes take the host's time for nothing
            break
        # Before more tokens of its own, a prefix is not read in place.
        is_near = shared <= row.num_cached < shared + COMMON_END
        if is_near and 0 < row.num_prefill - shared <= shared:
            key = key_at(row, shared)
            if key not in ends:
                ends[key] = num_shared(split_points(row, shared))
            if ends[key] == shared:
                found.append(row)
    return found


def _starting_after(cached: int, rows: Rows[Sequence], most: int) -> list[Sequence]:
    """The rows that may start there, in their order, with at most so many tokens computed again."""
    found, again = [], 0
    for row in rows:
        more = row.num_cached - cached
        if more < 0 or (row is not rows[0] and again + more > most):
            continue
        again += more
        found.append(row)
    return found


class Leaders:
    """Rows of a group whose next tokens others have in common with them.

    A row that would compute the same next block as a chosen one waits: it finds that block when the
    group is done. One that would compute the same partial block waits only if that is worth another
    pass, for ``room`` rows at most. ``uses`` is how many rows wait for a partial block.
    """

    def __init__(self, room: int, chunk_tokens: int, uses: Callable[[bytes], int]) -> None:
        self._room, self._chunk_tokens = room, chunk_tokens
        self._pass_tokens = chunk_tokens // PASS_SHARE
        self._uses = uses
        self._keys: set[bytes] = set()

    def choose(self, rows: Rows[Sequence], cached: int) -> list[Sequence]:
        """The rows of one chunk, in their order: all have ``cached`` tokens and need not wait."""
        chosen: list[Sequence] = []
        width = 0
        for row in rows:
            widest = max(width, row.num_prefill - cached)
            is_too_wide = bool(chosen) and (len(chosen) + 1) * widest > self._chunk_tokens
            if is_too_wide or self.precede(row):
                continue
            if len(chosen) == self._room:
                break
            chosen.append(row)
            width = widest
            self.add(row)
        return chosen

    def add(self, row: Sequence) -> None:
        """A row is chosen."""
        self._keys.update(key for key in (_next_block(row), _next_partial(row)) if key)

    def precede(self, row: Sequence) -> bool:
        """Whether a row should wait for one that is chosen."""
        if _next_block(row) in self._keys:
            return True
        return _next_partial(row) in self._keys and self._is_worth_it(row)

    def _is_worth_it(self, row: Sequence) -> bool:
        first = row.num_cached // PARTIAL_TOKENS
        uses = [self._uses(key) for key in row.partial_keys[first : first + _num_left(row)]]
        num_common = sum(PARTIAL_TOKENS for count in uses if 2 * count > uses[0])
        return (min(uses[0], self._room) - 1) * num_common > self._pass_tokens


def _next_block(row: Sequence) -> bytes | None:
    """Key of the first block that the row has to compute, if it is a full one."""
    number = row.num_cached // BLOCK_TOKENS
    return row.block_keys[number] if number < len(row.block_keys) else None


def _next_partial(row: Sequence) -> bytes | None:
    """Key of the first partial block that it has to compute."""
    number = row.num_cached // PARTIAL_TOKENS
    return row.partial_keys[number] if _num_left(row) and number < len(row.partial_keys) else None


def _num_left(row: Sequence) -> int:
    """How many partial keys lie between its cached tokens and the end of their block."""
    return (BLOCK_TOKENS - 1 - row.num_cached % BLOCK_TOKENS) // PARTIAL_TOKENS
