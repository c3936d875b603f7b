"""Estimates the prefix hits of a file before anything is queued: its groups and its hit rate.

There is no tokenizer here. A token is estimated as four bytes of text, and only whole blocks of 256
tokens count as shared. The estimate assumes workers that take runs of consecutive rows, share no
cache, and keep the prompt before in memory. With a shared cache there are more hits than that; with
too little memory there are fewer.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from batchkv_producer.agreed import BLOCK_TOKENS, RUN_ROWS
from batchkv_producer.order.prefix_order import BYTES_PER_TOKEN, Entry, shared_bytes

MAX_SHOWN_GROUPS = 20


@dataclass(frozen=True, slots=True)
class Group:
    """Consecutive rows with a common prefix of ``shared_bytes``. Tokens are estimates.

    ``cached_tokens``: prompt tokens that one worker need not compute, deeper prefixes included.
    """

    num_rows: int
    shared_bytes: int
    shared_tokens: int
    cached_tokens: int
    first_line: int


@dataclass(frozen=True, slots=True)
class PrefixEstimate:
    """The prefixes of a file. ``groups`` are the largest; rates are shares of prompt tokens."""

    num_tokens: int
    num_groups: int
    num_grouped: int
    groups: tuple[Group, ...]
    num_workers: int
    hit_rate_one: float
    hit_rate: float


def estimate_prefixes(entries: Iterable[Entry], num_rows: int, num_workers: int) -> PrefixEstimate:
    """Estimate ``num_rows`` rows in their order for ``num_workers``, in constant memory."""
    dealer = _Dealer(num_rows, num_workers)
    grouper = _Grouper()
    num_tokens = 0
    for entry in entries:
        num_tokens += entry.size // BYTES_PER_TOKEN
        dealer.deal(entry)
        grouper.add(entry)
    groups = grouper.finish()
    return PrefixEstimate(
        num_tokens=num_tokens,
        num_groups=grouper.num_groups,
        num_grouped=grouper.num_grouped,
        groups=groups,
        num_workers=num_workers,
        hit_rate_one=_rate(grouper.num_cached, num_tokens),
        hit_rate=_rate(dealer.num_cached, num_tokens),
    )


class _Dealer:
    """Gives runs to workers in turn, like a queue with equally fast workers."""

    def __init__(self, num_rows: int, num_workers: int) -> None:
        self._num_left = num_rows
        self._last: list[Entry | None] = [None] * num_workers
        self._worker = -1
        self._run_left = 0
        self.num_cached = 0  # tokens

    def deal(self, entry: Entry) -> None:
        if not self._run_left:
            self._worker = (self._worker + 1) % len(self._last)
            self._run_left = min(RUN_ROWS, -(-self._num_left // len(self._last)))
        self._run_left -= 1
        self._num_left -= 1
        before = self._last[self._worker]
        if before is not None:
            self.num_cached += cached_tokens(shared_bytes(before, entry))
        self._last[self._worker] = entry


class _Grouper:
    """Reads the rows in order. A group ends where two neighbours share less than a block."""

    def __init__(self) -> None:
        self.num_groups = 0
        self.num_grouped = 0
        self.num_cached = 0  # tokens, by one worker
        self._largest: list[tuple[tuple[int, int, int], Group]] = []
        self._rows: list[int] = []  # first line, rows, bytes that all share, cached tokens
        self._before: Entry | None = None

    def add(self, entry: Entry) -> None:
        shared = 0 if self._before is None else shared_bytes(self._before, entry)
        cached = cached_tokens(shared)
        self.num_cached += cached
        if cached and self._rows:
            line, num_rows, least, total = self._rows
            first = min(line, entry.line)
            self._rows = [first, num_rows + 1, min(least, shared), total + cached]
        else:
            self._close()
            self._rows = [entry.line, 1, entry.size, 0]
        self._before = entry

    def finish(self) -> tuple[Group, ...]:
        """The largest groups, most rows first."""
        self._close()
        return tuple(group for _, group in sorted(self._largest, reverse=True))

    def _close(self) -> None:
        if not self._rows or self._rows[1] == 1:
            return
        line, num_rows, least, cached = self._rows
        self.num_groups += 1
        self.num_grouped += num_rows
        group = Group(num_rows, least, least // BYTES_PER_TOKEN, cached, line)
        item = ((num_rows, least, -line), group)
        if len(self._largest) < MAX_SHOWN_GROUPS:
            heapq.heappush(self._largest, item)
        else:
            heapq.heappushpop(self._largest, item)


def cached_tokens(num_bytes: int) -> int:
    """The estimated tokens in the full blocks of a prefix of this many bytes."""
    num_tokens = num_bytes // BYTES_PER_TOKEN
    return num_tokens - num_tokens % BLOCK_TOKENS


def _rate(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
