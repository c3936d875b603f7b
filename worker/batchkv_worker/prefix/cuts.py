"""Cuts blocks out of computed prompts.

Each layer of a computed prompt has arrays of its own. So a block is put together from hundreds of
slices, and a device copies each by itself. Starting that takes the host longer than the copies take
the device. So neighbouring blocks of neighbouring rows are cut as if they were one, which is then
divided: by then it is few arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import mlx.core as mx

from batchkv_cache_store.blocks.block import Kind
from batchkv_cache_store.keys import BLOCK_TOKENS
from batchkv_worker.kv.layers.prefill_rows import PrefillRows
from batchkv_worker.prefix.block_layout import BlockLayout
from batchkv_worker.prefix.bundle import Bundle

MOST_BYTES = 160 * 2**20  # of blocks cut at once; until they are divided, they are held twice

Kinds = tuple[Kind, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring blocks that a row is to give, all of these ``kinds``.

    Between each two of ``bounds``, in tokens, is a block or the beginning of one.
    """

    bounds: tuple[int, ...]
    kinds: Kinds

    @property
    def num_tokens(self) -> int:
        return self.bounds[-1] - self.bounds[0]


def blocks_together(layout: BlockLayout) -> int:
    """How many blocks may be cut at once."""
    return max(1, MOST_BYTES // layout.largest)


def runs_of(
    layout: BlockLayout, first: int, wanted: Sequence[Kinds], num_after: int = 0
) -> list[Run]:
    """Runs of a row's blocks from number ``first`` on, as long as may be cut at once.

    ``wanted`` are the kinds of each block that are to be cut. ``num_after`` tokens behind the last
    one are wanted, too, in all kinds that keep tokens.
    """
    most, after = blocks_together(layout), layout.token_kinds
    ends = [(number * BLOCK_TOKENS, kinds) for number, kinds in enumerate(wanted, start=first)]
    last = (first + len(wanted)) * BLOCK_TOKENS
    ends += [(last, after)] if num_after else []
    found = []
    for kinds, some in groupby(ends, key=lambda one: one[1]):
        lows = [low for low, _ in some]
        # From the end, because the last blocks are asked for first.
        for stop in range(len(lows), 0, -most) if kinds else ():
            part = lows[max(0, stop - most) : stop]
            high = part[-1] + (num_after if part[-1] == last else BLOCK_TOKENS)
            found.append(Run((*part, high), kinds))
    return found


class GroupCuts:
    """Cuts blocks of the rows of a group, when they are asked for. ``runs`` are those of each row.

    Rows next to each other that have a run alike are cut together.
    """

    def __init__(
        self, layout: BlockLayout, prefill: PrefillRows, runs: Sequence[Sequence[Run]]
    ) -> None:
        self._layout, self._prefill, self._runs = layout, prefill, runs
        self._found: dict[tuple[int, int, Kind], Bundle] = {}  # by row and first token

    def tokens(self, index: int, low: int, high: int, kinds: Kinds) -> dict[Kind, Bundle]:
        """The parts of row ``index``'s tokens [low, high), which are a block or begin one."""
        keys = [(index, low, kind) for kind in kinds]
        if any(key not in self._found for key in keys):
            alone = Run((low, high), kinds)
            planned = (
                run
                for run in self._runs[index]
                if run.kinds == kinds and (low, high) in pairwise(run.bounds)
            )
            self._cut(index, next(planned, alone))
        return {key[-1]: self._found.pop(key) for key in keys}

    def _cut(self, index: int, run: Run) -> None:
        most = blocks_together(self._layout) * BLOCK_TOKENS // run.num_tokens
        count = 1
        while count < most and index + count < len(self._runs) and run in self._runs[index + count]:
            count += 1
        first, last = run.bounds[0], run.bounds[-1]
        pieces = self._prefill.block(index, first, last, count)
        new = {}
        for kind in run.kinds:
            whole = self._layout.part(kind, pieces)
            for row in range(count):
                for low, high in pairwise(run.bounds):
                    is_whole = count == 1 and (low, high) == (first, last)
                    part = whole if is_whole else _part(whole, row, low - first, high - first)
                    new[index + row, low, kind] = part
        # An unevaluated slice would keep the whole group's buffers alive.
        mx.async_eval([part.arrays for part in new.values()])
        self._found |= new


def _part(whole: Bundle, row: int, low: int, high: int) -> Bundle:
    """Tokens of one row, copied out: a view would keep the others in memory."""
    cells = slice(None), slice(row, row + 1), slice(None), slice(low, high)
    return whole.with_arrays([mx.contiguous(array[cells]) for array in whole.arrays])
