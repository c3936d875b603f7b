"""Pending lookups, on the engine's thread: which row waits for which block, and which gave up.

Rows that miss the same block need one lookup, not one each. A block that another worker computes is
looked up again after a while, once for all rows that wait for it.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from batchkv_worker.prefix.shared.fetch import Fetcher, Lookup, LookupResult
from batchkv_worker.sequence import Fetch, Sequence

RETRY_SECONDS = 0.1  # between looks at what another worker computes
MAX_HELD = 4096  # blocks of others that are remembered


@dataclass(frozen=True, slots=True)
class PendingLookup:
    """A lookup under way; ``missing`` is the first block that was not here when it began."""

    row: Sequence
    missing: bytes


class PendingLookups:
    """All pending lookups of one engine."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher
        self._tickets = itertools.count()
        self._asked: dict[int, PendingLookup] = {}
        self._asked_for: dict[bytes, int] = {}  # tickets by what is missing
        self._given_up: set[int] = set()  # tickets whose rows went on without an answer
        self._retry_at: dict[bytes, float] = {}  # of blocks that another worker computes
        self._answers: deque[LookupResult] = deque()
        self.idle_seconds = 0.0  # that the engine has waited since the last answer came

    @property
    def is_hung(self) -> bool:
        """Whether a result is overdue: a row went on without it."""
        return bool(self._given_up)

    @property
    def has_answers(self) -> bool:
        """Whether results came that were not taken."""
        return bool(self._answers)

    def may_ask(self, missing: bytes, now: float) -> bool:
        """Whether to look this block up now: no lookup is pending, and none just found a lease."""
        return missing not in self._asked_for and now >= self._retry_at.get(missing, 0.0)

    def ask(self, row: Sequence, missing: bytes, make: Callable[[int], Lookup]) -> None:
        """Start a lookup."""
        if not self._asked:
            self.idle_seconds = 0.0
        ticket = next(self._tickets)
        self._asked[ticket] = PendingLookup(row, missing)
        self._asked_for[missing] = ticket
        self._fetcher.ask(make(ticket))

    def is_held(self, missing: bytes) -> bool:
        """Whether another worker had the lease on this block at the last lookup."""
        return missing in self._retry_at

    def hold_off(self, missing: bytes) -> None:
        """Another worker computes this block: look it up again in RETRY_SECONDS."""
        now = time.monotonic()
        if len(self._retry_at) > MAX_HELD:  # nobody may ever ask for them again
            self._retry_at = {k: at for k, at in self._retry_at.items() if at > now}
        self._retry_at[missing] = now + RETRY_SECONDS

    def answers(self) -> Iterator[tuple[PendingLookup, LookupResult]]:
        """Results that have come, one by one; those that are not taken stay."""
        self._answers += self._fetcher.answers()
        if self._answers:
            self.idle_seconds = 0.0
        while self._answers:
            answer = self._answers.popleft()
            if not answer.is_last:
                self._fetcher.note_taken(answer)
                yield self._asked[answer.ticket], answer
                continue
            asked = self._asked.pop(answer.ticket)
            self._asked_for.pop(asked.missing, None)
            self._given_up.discard(answer.ticket)
            self._retry_at.pop(asked.missing, None)
            yield asked, answer

    def wait(self, timeout_seconds: float) -> None:
        """Wait for an answer, while the engine has nothing else to do."""
        if self.has_answers:
            return
        start = time.monotonic()
        self._fetcher.wait(timeout_seconds)
        self.idle_seconds += time.monotonic() - start

    def abandon(self, fetch: Fetch) -> None:
        """No row waits for this result: leases that it brings are released at once."""
        for ticket in self._tickets_of(fetch):
            self._fetcher.abandon(ticket)

    def give_up(self, fetch: Fetch) -> None:
        """A row goes on without its result; so does every row until the result comes."""
        self._given_up |= self._tickets_of(fetch)
        self.abandon(fetch)

    def _tickets_of(self, fetch: Fetch) -> set[int]:
        return {ticket for ticket, asked in self._asked.items() if asked.row.fetch is fetch}
