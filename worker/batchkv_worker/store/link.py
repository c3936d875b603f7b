"""A worker's end of the shared store: which rows wait for what.

Before a row's prompt is computed, the store is asked what it has of it; the row waits until the
answer is there, others go on meanwhile. What comes is put into the worker's own prefix memory, from
which rows are filled whether a block was computed here or not. Blocks computed here go the other
way, through the ``outbox``.

Nothing that the store does holds a row for long: for an answer that does not come, and for another
worker that does not get on, a row waits up to a limit, and is then computed.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from batchkv_cache_store.block import Block
from batchkv_cache_store.keys import BLOCK_TOKENS, chain, namespace, root_key
from batchkv_cache_store.lookup import Piece, Wanted
from batchkv_producer.cache_note import CacheNote, token_marks
from batchkv_worker.kv.bundle import Bundle
from batchkv_worker.kv.plan import KvPlan
from batchkv_worker.model import LoadedModel
from batchkv_worker.prefix import PrefixCache
from batchkv_worker.sequence import Fetch, FetchState, Sequence
from batchkv_worker.store.access import Access
from batchkv_worker.store.anatomy import Anatomy
from batchkv_worker.store.convert import FloatBlocks
from batchkv_worker.store.face import SharedPrefixes
from batchkv_worker.store.fetch import Answer, Fetcher, Question, packed_tokens
from batchkv_worker.store.identity import manifest
from batchkv_worker.store.outbox import Outbox

log = logging.getLogger("batchkv.cache")

AHEAD_ROWS = 32  # waiting rows whose lookups may be under way
RETRY_SECONDS = 0.1  # between looks at what another worker computes


@dataclass(frozen=True, slots=True)
class _Asked:
    row: Sequence
    missing: bytes  # the first block that is not here: nobody else need ask for it now

    @property
    def is_given_up(self) -> bool:
        """Whether the row has gone on without its answer."""
        return self.row.fetch is None or self.row.fetch.state is not FetchState.ASKED


class Link(SharedPrefixes):
    """One engine's lookups, leases and writes."""

    def __init__(self, access: Access, loaded: LoadedModel, plan: KvPlan) -> None:
        own = manifest(loaded, plan)
        self.namespace = namespace(own)
        self.root = root_key(self.namespace, access.salt)
        self.anatomy = Anatomy(plan.kinds)
        self._access = access
        self._store = access.store
        self._floats = FloatBlocks(plan.kinds) if access.adopts_float else None
        if self._floats is not None:
            self._float_namespace = namespace(self._floats.manifest(own))
        self._fetcher = Fetcher(access.store, access.leases, is_shared=access.is_shared)
        self.outbox = Outbox(
            *(access.store, access.leases, self.anatomy),
            *(self.namespace, self.root, access.writer),
        )
        self._tickets = itertools.count()
        self._asked: dict[int, _Asked] = {}
        self._ahead_bytes = 0  # fetched for rows that still wait
        self._prefixes: PrefixCache | None = None
        self.on_new = self.outbox.add
        access.store.publish_manifest(own)

    def attach(self, prefixes: PrefixCache) -> None:
        self._prefixes = prefixes

    @property
    def is_busy(self) -> bool:
        return len(self.outbox) > 0

    def begin(self, row: Sequence) -> None:
        if row.block_keys:
            row.fetch = Fetch()

    def advance(self, waiting: Iterable[Sequence]) -> None:
        answers = self._fetcher.answers()
        for answer in answers:
            self._take_in(answer)
        version = self._prefix_memory.version
        for row in itertools.islice(waiting, AHEAD_ROWS):
            fetch = row.fetch
            if fetch is None or fetch.state is FetchState.DONE:
                continue
            # Looking through a chain at every step would cost more than the step's own work.
            if answers or fetch.seen != version or fetch.state is FetchState.HELD:
                self.is_ready(row)
                fetch.seen = version

    def wait(self, timeout_seconds: float) -> None:
        self._fetcher.wait(timeout_seconds)

    def send(self, *, is_idle: bool) -> None:
        self.outbox.send(is_idle=is_idle)

    def is_ready(self, row: Sequence) -> bool:
        fetch = row.fetch
        if fetch is None or fetch.state is FetchState.DONE:
            return True
        now = time.monotonic()
        if fetch.state is FetchState.ASKED:
            is_late = now - fetch.asked_at > self._access.patience_seconds
            return is_late and self._give_up(fetch, "slow")
        depth = self._prefix_memory.depth(row.block_keys)
        # What is computed here, the scheduler sees to it that it is computed once.
        if depth == len(row.block_keys) or self.outbox.is_held(row.block_keys[depth]):
            return True
        if fetch.state is FetchState.HELD and now - fetch.held_since > self._access.held_seconds:
            return self._give_up(fetch, "held")
        if any(asked.is_given_up for asked in self._asked.values()):
            return True  # the store hangs: nobody else waits for it
        if now >= fetch.retry_at and self._may_ask(row, fetch, depth):
            self._ask(row, fetch, depth, now)
        return False

    def _may_ask(self, row: Sequence, fetch: Fetch, depth: int) -> bool:
        """Whether nobody asks for this block, and there is room for what may come."""
        missing = row.block_keys[depth]
        if any(asked.missing == missing for asked in self._asked.values()):
            return False
        others = self._ahead_bytes - fetch.num_bytes
        wanted = (len(row.block_keys) - depth) * self._prefix_memory.block_bytes
        if others and others + wanted > self._prefix_memory.max_bytes // 2:
            return False
        self._expect(fetch, wanted)
        return True

    def _expect(self, fetch: Fetch, num_bytes: int) -> None:
        """That much was or will be fetched for a row, and is not used yet."""
        self._ahead_bytes += num_bytes - fetch.num_bytes
        fetch.num_bytes = num_bytes

    def _give_up(self, fetch: Fetch, why: str) -> bool:
        """Nothing is waited for any longer than its limit."""
        self._expect(fetch, 0)
        fetch.state, fetch.stop = FetchState.DONE, why
        self._store.count(f"gave_up.{why}")
        return True

    def _ask(self, row: Sequence, fetch: Fetch, depth: int, now: float) -> None:
        if fetch.state is FetchState.NEW:
            fetch.local = depth
        fetch.state, fetch.asked_at = FetchState.ASKED, now
        ticket = next(self._tickets)
        self._asked[ticket] = _Asked(row, row.block_keys[depth])
        wanted = self._wanted(row, self.namespace, row.block_keys)
        floats = None
        if self._floats is not None and self._floats.is_needed:
            root = root_key(self._float_namespace, self._access.salt)
            prompt = row.prompt[: len(row.block_keys) * BLOCK_TOKENS]
            floats = self._wanted(row, self._float_namespace, chain(root, prompt))
        self._fetcher.ask(Question(ticket, wanted, floats))

    def _wanted(self, row: Sequence, space: bytes, keys: list[bytes]) -> Wanted:
        return Wanted(
            space,
            keys,
            packed_tokens(row.prompt[: len(keys) * BLOCK_TOKENS], BLOCK_TOKENS),
            has_kv=self.anatomy.has_kv,
            num_window_blocks=self.anatomy.num_window_blocks,
            has_state=self.anatomy.has_state,
            had=self._prefix_memory.pieces(row.block_keys),
        )

    def _take_in(self, answer: Answer) -> None:
        row = self._asked.pop(answer.ticket).row
        fetch = row.fetch
        if fetch is None or row.is_ended:  # nobody wants it any more
            for lease in answer.leases:
                self._access.leases.release(lease)
            return
        was = self._prefix_memory.depth(row.block_keys)
        num_bytes = self._adopt(row, answer)
        if fetch.state is FetchState.ASKED:
            self._expect(fetch, num_bytes)
        depth = self._prefix_memory.depth(row.block_keys)
        fetch.found += max(0, depth - was)
        fetch.stop = answer.stop
        self.outbox.hold(answer.leases, fetch)
        if fetch.state is not FetchState.ASKED:  # it went on without us, or is in its slot already
            self.outbox.forget(fetch)
            return
        now = time.monotonic()
        if not answer.is_held or depth == len(row.block_keys):
            fetch.state = FetchState.DONE
            return
        if depth > was or not fetch.held_since:
            fetch.held_since = now
        fetch.state, fetch.retry_at, fetch.stop = FetchState.HELD, now + RETRY_SECONDS, "held"

    def _adopt(self, row: Sequence, answer: Answer) -> int:
        """Put what came into the prefix memory; its bytes there."""
        own = self._bundles(answer.pieces, self.anatomy.bundle)
        self._prefix_memory.adopt(row.block_keys, own)
        num_bytes = sum(bundle.nbytes for bundle in own.values())
        if self._floats is not None and answer.floats:
            packed = self._bundles(answer.floats, self._floats.convert)
            self._prefix_memory.adopt(row.block_keys, packed, is_converted=True)
            num_bytes += sum(bundle.nbytes for bundle in packed.values())
            self._store.count("converted", len(packed))
        return num_bytes

    def _bundles(
        self, pieces: Mapping[Piece, Block], unpack: Callable[[Block], Bundle]
    ) -> dict[Piece, Bundle]:
        """Arrays of pieces; of those that are not this model's, none."""
        found: dict[Piece, Bundle] = {}
        for piece, block in pieces.items():
            try:
                found[piece] = unpack(block)
            except ValueError as fault:
                self._store.count("rejected.shape")
                log.warning("block %s: %s", block.key.hex()[:16], fault)
        return found

    @property
    def counters(self) -> dict[str, int]:
        """The store's counters (``batchkv_cache_store.store``), and those counted here:

        ``unlike`` parts held back since their arrays vary, ``rejected.shape`` parts of other
        arrays, ``converted`` float parts packed here, ``gave_up.slow`` and ``gave_up.held`` rows
        that stopped waiting, ``audited`` and ``audit_differs`` rows computed twice.
        """
        return self._store.counters()

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until everything handed on is written; False when the time was up first."""
        return self._store.flush(timeout_seconds)

    def count(self, name: str) -> None:
        self._store.count(name)

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        self._store.gate.observe_prefill(num_tokens, seconds)

    def note(self, row: Sequence) -> CacheNote | None:
        fetch, keys = row.fetch, row.block_keys
        if fetch is None:
            return None
        depth = row.num_cached // BLOCK_TOKENS
        found = min(fetch.found, depth)
        counts = (self.namespace, len(keys), depth - found, found, fetch.stop)
        if depth == len(keys):
            return CacheNote(*counts)
        low = depth * BLOCK_TOKENS
        return CacheNote(
            *counts,
            key=keys[depth],
            parent=keys[depth - 1] if depth else self.root,
            marks=token_marks(row.prompt[low : low + BLOCK_TOKENS]),
        )

    def forget(self, row: Sequence) -> None:
        fetch = row.fetch
        if fetch is None:
            return
        self._expect(fetch, 0)
        fetch.state = FetchState.DONE
        self.outbox.forget(fetch)

    def close(self) -> None:
        self.outbox.send(is_idle=True)
        self._fetcher.close(1.0)
        self._access.leases.close()
        self._access.store.close(self._access.close_seconds)
        self.outbox.close()
        told = ", ".join(f"{name} {count}" for name, count in self.counters.items() if count)
        log.info("cache: %s", told or "not used")

    @property
    def _prefix_memory(self) -> PrefixCache:
        assert self._prefixes is not None, "attach comes first"
        return self._prefixes
