"""Where shared prefixes lie in a layer's pool: one buffer, from which each row reads its own part.

Attention over each prefix by itself starts kernels for each of them. With many short prefixes that
takes longer than all that the rows read. In a pool the rows of all prefixes are attended at once:
each row from the first column of its prefix to the last, whatever prefixes other rows have. Rows
with a long prefix in common are better attended together, by products that read it once (``pays``).

Plain Python, like the layouts: arrays are the layers' own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from batchkv_worker.kv.attention.prefix_part import PrefixPart

# What the products over one prefix take, in cells (one row's keys and values of a column) that the
# kernel reads in that time. On an H200 a step of 62 rows behind 1,024 tokens took 12.5 ms from the
# pool and 15.9 ms by products, which start about ten kernels for each prefix and layer.
START_CELLS = 98_304
TOGETHER_TOKENS = 1024  # rows with a prefix of this length are neighbours, for the products
LEVEL_TOKENS = 512  # bounds of what rows read are multiples of this, so that they seldom change
SPARE = 2  # a pool has at most this many times the columns in use, else a smaller one comes

Place = tuple[int, int]  # the first column, and the one after the last


def pays(lengths: Iterable[int], num_products: int) -> bool:
    """Whether rows that read so many tokens each of prefixes are better attended in the pool.

    ``num_products``: how many products over prefixes there would be instead.
    """
    return 0 < sum(lengths) <= num_products * START_CELLS


class PrefixPool:
    """The columns of each prefix. ``state`` changes with any of them, ``version`` with the buffer.

    ``capacity`` is the buffer's number of columns, a power of two: each other number of columns
    makes the host build a step anew.
    """

    def __init__(self) -> None:
        self.capacity = self.version = self.state = 0
        self._places: dict[int, Place] = {}  # by rank

    def hold(self, parts: Mapping[int, PrefixPart]) -> None:
        """Keep these parts, by rank, and no others. Those that stay are not moved if all fit."""
        if self._places.keys() == parts.keys():
            return
        self.state += 1
        self._places = {rank: at for rank, at in self._places.items() if rank in parts}
        total = sum(part.num_own for part in parts.values())
        new = sorted(parts.keys() - self._places.keys())
        is_full = not all(self._put(rank, parts[rank].num_own) for rank in new)
        if is_full or self.capacity > SPARE * total:
            self._start_again(parts, total)

    def place(self, part: PrefixPart) -> Place:
        """The columns of a part that is held."""
        return self._places[part.rank]

    def places(self) -> dict[int, Place]:
        """The columns of all parts, by rank."""
        return dict(self._places)

    def _put(self, rank: int, count: int) -> bool:
        """Give a part the first gap that is large enough; False if there is none."""
        first = 0
        for low, high in sorted(self._places.values()):
            if low - first >= count:
                break
            first = high
        if first + count > self.capacity:
            return False
        self._places[rank] = first, first + count
        return True

    def _start_again(self, parts: Mapping[int, PrefixPart], total: int) -> None:
        """Another buffer, with all parts side by side; those that were neighbours still are."""
        self.version += 1
        self.capacity = 1 << (total - 1).bit_length() if total else 0
        old, self._places = self._places, {}
        for rank in sorted(parts, key=lambda rank: (rank not in old, old.get(rank), rank)):
            self._put(rank, parts[rank].num_own)


def levels_of(chains: Sequence[Sequence[PrefixPart]]) -> list[list[PrefixPart | None]]:
    """For each depth of the chains of all rows, the part that each row has there."""
    depth = max(map(len, chains), default=0)
    return [[chain[at] if at < len(chain) else None for chain in chains] for at in range(depth)]
