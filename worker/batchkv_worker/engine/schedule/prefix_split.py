"""Which parts of a prompt are held once for several rows: where stems end. No tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchkv_cache_store.keys import BLOCK_TOKENS

MAX_STEMS = 4  # that one row reads
MAX_PLACES = 16  # at which stems may end: those before which most rows part

Cuts = tuple[int, ...]  # blocks up to the end of each stem of a chain, ascending


def num_blocks(cuts: Cuts) -> int:
    """Blocks that stand in stems."""
    return cuts[-1] if cuts else 0


@dataclass(frozen=True, slots=True)
class StemCosts:
    """What a stem must save, in cells: the first of a chain, and one that grows on another.

    The latter parts the rows of the one that it grows on into groups, whose kernels cost, too.
    ``most`` is how many stems a chain may have.
    """

    first: int = 0
    another: int = 0
    most: int = MAX_STEMS


def cuts_of(wanted: Sequence[int], held: Cuts, costs: StemCosts) -> Cuts:
    """Where the stems of a prompt should end; it begins with those that are ``held`` already.

    ``wanted`` says of each block how many waiting rows have it. A stem saves what it holds, once
    for every row but one; of the ways in which every stem pays, the one that saves most.
    """
    # What ways to cut save, each the best of those that end where it does with as many cuts.
    best: list[tuple[int, Cuts]] = [(0, held)]
    for end in _places(wanted, num_blocks(held)):
        found: dict[int, tuple[int, Cuts]] = {}
        for saved, cuts in best:
            cells = (wanted[end - 1] - 1) * (end - num_blocks(cuts)) * BLOCK_TOKENS
            cost = costs.another if cuts else costs.first
            if cells >= max(1, cost) and len(cuts) < costs.most:
                way = saved + cells - cost, (*cuts, end)
                found[len(cuts)] = max(way, found.get(len(cuts), way))
        best += found.values()
    return max(best)[1]


def _places(wanted: Sequence[int], held: int) -> list[int]:
    """Blocks after which rows part, ascending: a stem that ends elsewhere could go on for free.

    Of very many, those where most tokens part.
    """
    ends = [
        number
        for number in range(held + 1, len(wanted) + 1)
        if number == len(wanted) or wanted[number] < wanted[number - 1]
    ]

    def parting(end: int) -> int:
        return end * (wanted[end - 1] - (wanted[end] if end < len(wanted) else 0))

    return sorted(sorted(ends, key=parting, reverse=True)[:MAX_PLACES])
