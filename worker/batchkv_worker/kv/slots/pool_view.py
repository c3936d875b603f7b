"""What one step reads of the pool of shared prefixes, the same for all layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import mlx.core as mx

from batchkv_worker.kv.attention.records import Level, bounds_of, places_of
from batchkv_worker.kv.slots.growth import round_up
from batchkv_worker.kv.slots.prefix_pool import LEVEL_TOKENS, Place, PrefixPool, levels_of

if TYPE_CHECKING:
    from batchkv_worker.kv.attention.shared_prefix import SharedPrefix


@dataclass(frozen=True, slots=True)
class PoolView:
    """The pool in the step at hand.

    ``chain`` is that of ``Partials``: level after level has a result for each row. ``parts`` are
    all that the pool holds, by rank, and ``places`` their columns. ``state`` and ``version`` are
    those of ``PrefixPool``.
    """

    state: int
    version: int
    capacity: int
    levels: tuple[Level, ...]
    chain: mx.array
    places: Mapping[int, Place]
    parts: Mapping[int, SharedPrefix] = field(repr=False)

    def runs(self, old: Mapping[int, Place]) -> list[tuple[int, int, int]]:
        """What stays when the buffer changes; ``old`` are the places in the one before.

        Of each run of columns its first one there, the one after its last, and its first one here.
        """
        found: list[tuple[int, int, int]] = []
        for rank in sorted(old.keys() & self.places.keys(), key=lambda rank: old[rank]):
            (low, high), at = old[rank], self.places[rank][0]
            if found and found[-1][1] == low and at - found[-1][2] == low - found[-1][0]:
                found[-1] = found[-1][0], high, found[-1][2]
            else:
                found.append((low, high, at))
        return found

    @property
    def shape(self) -> tuple[int, tuple[int, ...]]:
        """Equal for steps that may have one graph."""
        return self.capacity, tuple(level.longest for level in self.levels)

    @property
    def arrays(self) -> list[mx.array]:
        """What changes from step to step."""
        return [*(level.bounds for level in self.levels), self.chain]

    def with_arrays(self, given: Iterator[mx.array]) -> PoolView:
        """The same view with the next of ``given`` in the place of ``arrays``."""
        levels = tuple([replace(level, bounds=next(given)) for level in self.levels])
        return replace(self, levels=levels, chain=next(given))


def view_of(pool: PrefixPool, rows: Sequence[SharedPrefix | None]) -> PoolView:
    """The view for the prefixes of rows, by slot; the pool then holds these and no others."""
    chains = [[] if one is None else one.chain for one in rows]
    parts = {part.rank: part for chain in chains for part in chain}
    pool.hold(parts)
    levels = []
    for level in levels_of(chains):
        places = [(0, 0) if part is None else pool.place(part) for part in level]
        longest = max(high - low for low, high in places)
        bounds = bounds_of(*zip(*places, strict=True))
        levels.append(Level(bounds, round_up(longest, LEVEL_TOKENS)))
    count = len(rows)
    results = [
        [depth * count + row for depth in range(len(chain))] for row, chain in enumerate(chains)
    ]
    chain = places_of(results)
    what = pool.state, pool.version, pool.capacity, tuple(levels), chain, pool.places(), parts
    return PoolView(*what)
