"""Lookups in the shared store, on threads of their own while rows decode.

A lookup finds the longest stored prefix of a prompt. It then tries to lease the missing blocks, so
that no other worker computes them at the same time. If another worker has the lease on the first
missing block, the row has to wait. Between a lookup and its lease the holder may have published the
block and released it. So a lookup that gets a lease, among several workers, looks once more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from queue import Empty, SimpleQueue

from batchkv_cache_store.blocks.block import Block, Kind
from batchkv_cache_store.lease import Lease, Leases
from batchkv_cache_store.lookup import MAX_FETCH_BYTES, Found, Piece, Wanted
from batchkv_cache_store.store import Store
from batchkv_worker.trace import ENGINE, STORE

log = logging.getLogger("batchkv.cache")

NUM_THREADS = 2
HAND_SECONDS = 30.0  # how long a block waits for the engine, which then gets it all the same
MAX_LEASES = 64  # of one prompt at once: its blocks are computed in order
UNKNOWN_TIER = "store"
_MAX_LOOKS = 4  # at one prompt, while others publish what it was about to lease


@dataclass(frozen=True, slots=True)
class Lookup:
    """A lookup to make.

    ``num_worth``: blocks that will be written once they are computed; the others are not leased.
    ``floats``: the same prompt's blocks in the float namespace, if wanted. ``is_near``: far tiers
    cannot have them.
    """

    ticket: int
    wanted: Wanted
    num_worth: int
    floats: Wanted | None = None
    is_near: bool = False


@dataclass(slots=True)
class LookupResult:
    """The result of a lookup.

    ``depth``: blocks that can be gone on from with ``pieces`` and what the asker had. ``leases``
    are held for blocks after it; ``is_held``: another worker computes the next one. ``floats``:
    pieces of the float namespace that go deeper. ``tiers``: where each piece came from, by name.
    ``is_near``: far tiers were not looked into. ``is_last``: False for one block of a result that
    comes before the rest.
    """

    ticket: int
    depth: int = 0
    pieces: dict[Piece, Block] = field(default_factory=dict)
    floats: Mapping[Piece, Block] = field(default_factory=dict)
    leases: list[Lease] = field(default_factory=list)
    is_held: bool = False
    stop: str = ""
    tiers: dict[Piece, str] = field(default_factory=dict)
    is_near: bool = False
    is_last: bool = True
    handed: Set[Piece] = frozenset()  # pieces that came before, as results of their own

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays of ``pieces``."""
        return sum(one.num_bytes for block in self.pieces.values() for one in block.tensors)


def tiers_of_blocks(answer: LookupResult, numbers: range) -> list[str]:
    """The name of the tier of each of these blocks.

    A model whose layers keep a state has no piece for every block. A block without one came with
    the next deeper piece.
    """
    names: list[str] = []
    for number in reversed(numbers):
        own = (answer.tiers.get((number, kind)) for kind in Kind)
        names.append(next(filter(None, own), names[-1] if names else UNKNOWN_TIER))
    return names


class Fetcher:
    """Threads that make lookups, in order. The engine calls ``ask`` and ``answers``."""

    def __init__(self, store: Store, leases: Leases, *, is_shared: bool) -> None:
        self._store = store
        self._leases = leases
        self._is_shared = is_shared  # whether other processes may hold leases
        self._lookups: SimpleQueue[Lookup | None] = SimpleQueue()
        self._answers: SimpleQueue[LookupResult] = SimpleQueue()
        self._has_answers = threading.Event()
        self._lock = threading.Lock()
        self._taken = threading.Condition(self._lock)
        self._num_handed = 0  # bytes of blocks that were handed over and not taken yet
        self._is_closed = False
        self._abandoned: set[int] = set()
        self._leavings: SimpleQueue[Sequence[Lease] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"batchkv-fetch-{n}", daemon=True)
            for n in range(NUM_THREADS)
        ]
        self._threads.append(
            threading.Thread(target=self._let_go, name="batchkv-leases-out", daemon=True)
        )
        for thread in self._threads:
            thread.start()

    def ask(self, question: Lookup) -> None:
        """Queue a lookup; its result comes, whatever happens."""
        self._lookups.put(question)

    def abandon(self, ticket: int) -> None:
        """Release the leases of this result as soon as it comes: no row waits for it any more.

        A result that has come already keeps its leases.
        """
        with self._taken:
            self._abandoned.add(ticket)
            self._taken.notify_all()

    def answers(self) -> list[LookupResult]:
        """Results that came since the last call."""
        self._has_answers.clear()
        found: list[LookupResult] = []
        try:
            while True:
                found.append(self._answers.get_nowait())
        except Empty:
            pass
        with self._lock:  # abandoned when they were there already
            self._abandoned -= {answer.ticket for answer in found if answer.is_last}
        return found

    def note_taken(self, answer: LookupResult) -> None:
        """The engine has what a result brought: the next blocks may come."""
        if not answer.is_last:
            with self._taken:
                self._num_handed -= answer.num_bytes
                self._taken.notify_all()

    def _hand_over(self, ticket: int, piece: Piece, block: Block, tier: str) -> bool:
        """Pass one block on. Waits while the engine has not taken the blocks before it.

        Returns False if nobody wants it.
        """
        part = LookupResult(ticket, pieces={piece: block}, tiers={piece: tier}, is_last=False)
        with self._taken:

            def may_go_on() -> bool:
                is_over = self._is_closed or ticket in self._abandoned
                return is_over or self._num_handed < MAX_FETCH_BYTES

            if not self._taken.wait_for(may_go_on, HAND_SECONDS):
                log.warning("the engine takes no blocks for %.0f s", HAND_SECONDS)
            if self._is_closed or ticket in self._abandoned:
                return False
            self._num_handed += part.num_bytes
        self._answers.put(part)
        self._has_answers.set()
        return True

    def wait(self, timeout_seconds: float) -> None:
        """Wait for a result."""
        before = ENGINE.enter(STORE)
        self._has_answers.wait(timeout_seconds)
        ENGINE.enter(before)

    def release(self, leases: Sequence[Lease]) -> None:
        """Release leases, on a thread of its own."""
        if leases:
            self._leavings.put(leases)

    def close(self, timeout_seconds: float) -> None:
        """End the threads; one that a tier keeps longer is left behind."""
        with self._taken:
            self._is_closed = True
            self._taken.notify_all()
        for _ in range(NUM_THREADS):
            self._lookups.put(None)
        self._leavings.put(None)
        deadline = time.monotonic() + timeout_seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while (question := self._lookups.get()) is not None:
            answer = LookupResult(question.ticket, is_near=question.is_near)
            try:
                self._look(question, answer)
            except Exception:  # whatever broke here, the row is computed
                log.exception("a lookup failed")
                answer.stop = "trouble lookup"
            with self._lock:
                self._answers.put(answer)
                is_abandoned = answer.ticket in self._abandoned
                self._abandoned.discard(answer.ticket)
                if is_abandoned:
                    leases, answer.leases = answer.leases, []
            if is_abandoned:
                self.release(leases)
            self._has_answers.set()

    def _let_go(self) -> None:
        while (leases := self._leavings.get()) is not None:
            try:
                self._leases.release_many(leases)
            except Exception:  # they lapse by themselves
                log.exception("leases could not be let go")

    def _look(self, question: Lookup, answer: LookupResult) -> None:
        wanted, hand_over = question.wanted, partial(self._hand_over, question.ticket)
        for _ in range(_MAX_LOOKS):
            found = self._store.lookup(wanted, is_near=question.is_near, hand_over=hand_over)
            answer.handed |= found.handed
            is_deeper = self._take(found, answer)
            if answer.leases and not is_deeper:
                break  # nobody published meanwhile: they are ours to compute
            self._release(answer)
            most = min(found.depth + MAX_LEASES, question.num_worth)
            missing = wanted.keys[found.depth : most]
            if not missing or found.stop in ("gated", "unwanted"):
                break
            answer.leases = self._leases.acquire_chain(missing)
            answer.is_held = not answer.leases
            if answer.is_held or not self._is_shared:
                break
            wanted = replace(wanted, had=wanted.had | found.pieces.keys() | answer.handed)
        if question.floats is not None and answer.depth < len(wanted.keys):
            had = question.floats.had | answer.pieces.keys() | answer.handed
            floats = replace(question.floats, had=had)
            found = self._store.lookup(floats, is_near=question.is_near)
            if found.depth > answer.depth:
                answer.floats = found.pieces
                answer.tiers.update(found.tiers)
                self._release(answer)  # what rests on converted blocks is never published
                answer.is_held = False

    def _take(self, found: Found, answer: LookupResult) -> bool:
        """Add what was found; whether that goes deeper than what was found before."""
        is_deeper = found.depth > answer.depth
        if is_deeper or not answer.stop:
            answer.pieces.update(found.pieces)
            answer.tiers.update(found.tiers)
            answer.depth = max(answer.depth, found.depth)
            answer.stop = found.stop
        return is_deeper

    def _release(self, answer: LookupResult) -> None:
        self._leases.release_many(answer.leases)
        answer.leases = []
