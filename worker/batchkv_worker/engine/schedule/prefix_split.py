"""Where a prompt is split into shared prefixes, each stored once for several rows. No tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchkv_cache_store.keys import BLOCK_TOKENS
from batchkv_worker.prefix.partial_blocks import PARTIAL_TOKENS
from batchkv_worker.sequence import Sequence as Row

MAX_PARTS = 4  # shared prefixes in the chain that one row reads
MAX_PLACES = 16  # split points that are tried: those at which most rows differ

SplitPoints = tuple[int, ...]  # tokens up to the end of each part of a chain, ascending


def num_shared(points: SplitPoints) -> int:
    """Tokens in shared prefixes."""
    return points[-1] if points else 0


def unit_of(row: Row) -> int:
    """A row's shared prefixes end after a multiple of so many tokens."""
    return PARTIAL_TOKENS if row.partial_keys else BLOCK_TOKENS


def keys_of(row: Row, num_tokens: int) -> list[bytes]:
    """The key of each place within these tokens where a shared prefix may end, ascending."""
    keys = row.partial_keys or row.block_keys
    return keys[: num_tokens // unit_of(row)]


def key_at(row: Row, num_tokens: int) -> bytes | None:
    """The key of a row's first tokens, as many as a shared prefix may have; None: it has none."""
    keys, number = row.partial_keys or row.block_keys, num_tokens // unit_of(row)
    return keys[number - 1] if 0 < number <= len(keys) else None


@dataclass(frozen=True, slots=True)
class PrefixCosts:
    """How many cells a shared prefix must save: the first of a chain, and another one after it.

    Another one splits the rows of the first into groups, and each group starts kernels.
    ``most`` is how many parts a chain may have. ``joined``: few rows behind each of several
    prefixes are computed in one chunk, if they have so many tokens at most; 0: they are not.
    """

    first: int = 0
    another: int = 0
    most: int = MAX_PARTS
    joined: int = 0


def choose_split_points(
    wanted: Sequence[int], unit: int, held: SplitPoints, costs: PrefixCosts
) -> SplitPoints:
    """Where the shared prefixes of a prompt end; the result begins with ``held``, those in use.

    ``wanted``: how many waiting rows begin with ``unit`` of its tokens, with twice as many, and so
    on. A shared prefix saves its cells once for every row but one. Each new one must save more than
    it costs. Among all such choices the one that saves most cells is returned.
    """
    # For each end and number of points, the best choice of points and the cells that it saves.
    best: list[tuple[int, SplitPoints]] = [(0, held)]
    for number in _places(wanted, num_shared(held) // unit):
        end = number * unit
        found: dict[int, tuple[int, SplitPoints]] = {}
        for saved, points in best:
            cells = (wanted[number - 1] - 1) * (end - num_shared(points))
            cost = costs.another if points else costs.first
            if cells >= max(1, cost) and len(points) < costs.most:
                way = saved + cells - cost, (*points, end)
                found[len(points)] = max(way, found.get(len(points), way))
        best += found.values()
    return max(best)[1]


def _places(wanted: Sequence[int], held: int) -> list[int]:
    """Units after which rows differ, ascending; a prefix that ends elsewhere is never better.

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
