"""Where a prompt is split into shared prefixes, each stored once for several rows. No tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchkv_cache_store.keys import BLOCK_TOKENS

MAX_PARTS = 4  # shared prefixes in the chain that one row reads
MAX_PLACES = 16  # split points that are tried: those at which most rows differ

SplitPoints = tuple[int, ...]  # blocks up to the end of each part of a chain, ascending


def num_blocks(points: SplitPoints) -> int:
    """Blocks in shared prefixes."""
    return points[-1] if points else 0


@dataclass(frozen=True, slots=True)
class PrefixCosts:
    """How many cells a shared prefix must save: the first of a chain, and another one after it.

    Another one splits the rows of the first into groups, and each group starts kernels.
    ``most`` is how many parts a chain may have.
    """

    first: int = 0
    another: int = 0
    most: int = MAX_PARTS


def choose_split_points(
    wanted: Sequence[int], held: SplitPoints, costs: PrefixCosts
) -> SplitPoints:
    """Where the shared prefixes of a prompt end; the result begins with ``held``, those in use.

    ``wanted``: for each block, the number of waiting rows with it. A shared prefix saves its cells
    once for every row but one. Each new one must save more than it costs. Among all such choices
    the one that saves most cells is returned.
    """
    # For each end and number of points, the best choice of points and the cells that it saves.
    best: list[tuple[int, SplitPoints]] = [(0, held)]
    for end in _places(wanted, num_blocks(held)):
        found: dict[int, tuple[int, SplitPoints]] = {}
        for saved, points in best:
            cells = (wanted[end - 1] - 1) * (end - num_blocks(points)) * BLOCK_TOKENS
            cost = costs.another if points else costs.first
            if cells >= max(1, cost) and len(points) < costs.most:
                way = saved + cells - cost, (*points, end)
                found[len(points)] = max(way, found.get(len(points), way))
        best += found.values()
    return max(best)[1]


def _places(wanted: Sequence[int], held: int) -> list[int]:
    """Blocks after which rows differ, ascending; a prefix that ends elsewhere is never better.

    At most MAX_PLACES of them: those where most tokens differ.
    """
    ends = [
        number
        for number in range(held + 1, len(wanted) + 1)
        if number == len(wanted) or wanted[number] < wanted[number - 1]
    ]

    def parting(end: int) -> int:
        return end * (wanted[end - 1] - (wanted[end] if end < len(wanted) else 0))

    return sorted(sorted(ends, key=parting, reverse=True)[:MAX_PLACES])
