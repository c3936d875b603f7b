"""Lookups in the shared store, on threads of their own while rows decode.

A lookup finds the longest stored prefix of a prompt. What it does not find it tries to lease, so
that no other worker computes it at the same time; if another has the first missing block already,
the row is told to wait. Between a lookup and its lease the holder may have published and let go, so
that whoever gets a lease among several workers looks once more.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue

from batchkv_cache_store.block import Block
from batchkv_cache_store.lease import Lease, Leases
from batchkv_cache_store.lookup import Found, Piece, Wanted
from batchkv_cache_store.store import Store

log = logging.getLogger("batchkv.cache")

NUM_THREADS = 2
_MAX_LOOKS = 4  # at one prompt, while others publish what it was about to lease


@dataclass(frozen=True, slots=True)
class Question:
    """A lookup to make. ``floats``: the same prompt's blocks in the float namespace, if wanted."""

    ticket: int
    wanted: Wanted
    floats: Wanted | None = None


@dataclass(slots=True)
class Answer:
    """What came of it.

    ``depth``: blocks that can be gone on from with ``pieces`` and what the asker had. ``leases``
    are held for blocks after it; ``is_held``: another worker computes the next one. ``floats``:
    pieces of the float namespace that go deeper.
    """

    ticket: int
    depth: int = 0
    pieces: dict[Piece, Block] = field(default_factory=dict)
    floats: Mapping[Piece, Block] = field(default_factory=dict)
    float_depth: int = 0
    leases: list[Lease] = field(default_factory=list)
    is_held: bool = False
    stop: str = ""
    seconds: float = 0.0


class Fetcher:
    """Threads that answer questions, in order. ``ask`` and ``answers`` are the engine's side."""

    def __init__(self, store: Store, leases: Leases, *, is_shared: bool) -> None:
        self._store = store
        self._leases = leases
        self._is_shared = is_shared  # whether other processes may hold leases
        self._questions: SimpleQueue[Question | None] = SimpleQueue()
        self._answers: SimpleQueue[Answer] = SimpleQueue()
        self._has_answers = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, name=f"batchkv-fetch-{n}", daemon=True)
            for n in range(NUM_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def ask(self, question: Question) -> None:
        """Queue a lookup; its answer comes, whatever happens."""
        self._questions.put(question)

    def answers(self) -> list[Answer]:
        """What has been answered since the last call."""
        self._has_answers.clear()
        found: list[Answer] = []
        try:
            while True:
                found.append(self._answers.get_nowait())
        except Empty:
            return found

    def wait(self, timeout_seconds: float) -> None:
        """Wait for an answer."""
        self._has_answers.wait(timeout_seconds)

    def close(self, timeout_seconds: float) -> None:
        """End the threads; one that a tier keeps longer is left behind."""
        for _ in self._threads:
            self._questions.put(None)
        deadline = time.monotonic() + timeout_seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while (question := self._questions.get()) is not None:
            start = time.monotonic()
            answer = Answer(question.ticket)
            try:
                self._look(question, answer)
            except Exception:  # whatever broke here, the row is computed
                log.exception("a lookup failed")
                answer.stop = "trouble lookup"
            answer.seconds = time.monotonic() - start
            self._answers.put(answer)
            self._has_answers.set()

    def _look(self, question: Question, answer: Answer) -> None:
        wanted = question.wanted
        for _ in range(_MAX_LOOKS):
            found = self._store.lookup(wanted)
            is_deeper = self._take(found, answer)
            if answer.leases and not is_deeper:
                break  # nobody published meanwhile: they are ours to compute
            self._release(answer)
            missing = wanted.keys[found.depth :]
            if not missing or found.stop == "gated":
                break
            answer.leases = self._leases.acquire_chain(missing)
            answer.is_held = not answer.leases
            if answer.is_held or not self._is_shared:
                break
            wanted = replace(wanted, had=wanted.had | found.pieces.keys())
        if question.floats is not None and answer.depth < len(wanted.keys):
            had = question.floats.had | answer.pieces.keys()
            found = self._store.lookup(replace(question.floats, had=had))
            if found.depth > answer.depth:
                answer.floats, answer.float_depth = found.pieces, found.depth

    def _take(self, found: Found, answer: Answer) -> bool:
        """Add what was found; whether that goes deeper than what was found before."""
        is_deeper = found.depth > answer.depth
        if is_deeper or not answer.stop:
            answer.pieces.update(found.pieces)
            answer.depth = max(answer.depth, found.depth)
            answer.stop = found.stop
        return is_deeper

    def _release(self, answer: Answer) -> None:
        for lease in answer.leases:
            self._leases.release(lease)
        answer.leases = []


def packed_tokens(tokens: Sequence[int], block_tokens: int) -> list[bytes]:
    """Token ids as little-endian u32, block by block, full blocks only."""
    packed = struct.pack(f"<{len(tokens)}I", *tokens)
    size = 4 * block_tokens
    return [packed[at : at + size] for at in range(0, len(packed) - size + 1, size)]
