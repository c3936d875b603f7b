"""Rows whose prompts are computed together. No tensors."""

from __future__ import annotations

from dataclasses import dataclass

from batchkv_worker.engine.schedule.prefix_split import SplitPoints, key_at, keys_of, num_shared
from batchkv_worker.kv.attention.prefix_part import PrefixPart
from batchkv_worker.kv.slots.changes import Demand
from batchkv_worker.sequence import Sequence


@dataclass(slots=True)
class PrefillGroup:
    """Rows whose prompts are computed together, padded on the right to the longest.

    A group of several rows fits one chunk; a prompt longer than a chunk is a group of its own. All
    rows of a group start after the same number of cached tokens, so that one causal mask and one
    position serve them.
    """

    rows: list[Sequence]
    position: int = 0  # tokens computed, or taken from the cache, so far; see advance
    split_points: SplitPoints = ()  # of the prefix that all its rows share with others
    shared_prefix: PrefixPart | None = None  # the last part of that prefix; see share
    is_apart: bool = False  # its rows are behind different prefixes, each its cached tokens

    def beside(self, row: Sequence) -> dict[bytes, int]:
        """How many of its rows, this one too, have the prefix of one, by each key of that.

        None of a group that is behind one prefix: its split points say it.
        """
        if not self.is_apart:
            return {}
        end = row.num_cached
        key = key_at(row, end)
        count = sum(key_at(other, end) == key for other in self.rows)
        return dict.fromkeys(keys_of(row, end), count)

    def share(self, part: PrefixPart | None) -> None:
        """Its rows are computed after this shared prefix; None: without one."""
        self.shared_prefix = part

    def advance(self, position: int) -> None:
        """Its rows are computed up to here."""
        self.position = position

    @property
    def is_live(self) -> bool:
        """Whether somebody waits for its rows. Live rows are in groups of their own."""
        return self.rows[0].is_live

    @property
    def wanted(self) -> list[Sequence]:
        """Its rows that were not cancelled."""
        return [row for row in self.rows if not row.is_ended]

    @property
    def demands(self) -> list[Demand]:
        """The columns that its rows need; cancelled rows too, since they are computed as well."""
        shared = self.num_shared
        return [Demand(row.num_prefill, row.num_remaining, shared) for row in self.rows]

    @property
    def shared_keys(self) -> list[bytes]:
        """Keys of the places within the shared prefix where one may end."""
        return keys_of(self.rows[0], self.num_shared)

    @property
    def num_shared(self) -> int:
        """Tokens in the shared prefix."""
        return num_shared(self.split_points)

    def chunk_end(self, chunk_tokens: int, width: int) -> int:
        """Where the next chunk ends, in tokens: not after a point where states are kept."""
        end = min(width, self.position + chunk_tokens)
        stops = (stop for row in self.rows for stop in row.state_stops)
        return min((stop for stop in stops if self.position < stop < end), default=end)

    @property
    def width(self) -> int:
        """Tokens of the longest row."""
        return max(row.num_prefill for row in self.rows)

    @property
    def is_computed(self) -> bool:
        return self.position >= self.width
