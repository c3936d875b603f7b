"""A worker's client of the shared store: which rows wait for a lookup or a lease.

Before a row's prompt is computed, its prefix is looked up in the store. The row waits for the
result; other rows go on. Found blocks are put into the worker's own prefix memory. Rows are filled
from that memory alone. Blocks that are computed here are written through the ``outbox``.

A row waits for a lookup, and for another worker's lease, up to a limit each. Then it is computed.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack

from batchkv_cache_store.blocks.block import Block
from batchkv_cache_store.keys import BLOCK_TOKENS, chain, namespace, own_root, root_key
from batchkv_cache_store.lookup import Piece
from batchkv_cache_store.tiers.base import STREAM_BYTES
from batchkv_producer.wire.cache_note import CacheNote, token_marks
from batchkv_worker.kv.start.plan import KvPlan
from batchkv_worker.model.loader import LoadedModel
from batchkv_worker.prefix.block_layout import BlockLayout
from batchkv_worker.prefix.bundle import Bundle
from batchkv_worker.prefix.interface import PrefixClient
from batchkv_worker.prefix.memory import PrefixCache
from batchkv_worker.prefix.shared.access import Access
from batchkv_worker.prefix.shared.convert import FloatBlocks
from batchkv_worker.prefix.shared.fetch import (
    Fetcher,
    Lookup,
    LookupResult,
    tiers_of_blocks,
)
from batchkv_worker.prefix.shared.identity import manifest
from batchkv_worker.prefix.shared.outbox import Outbox
from batchkv_worker.prefix.shared.pending import PendingLookup, PendingLookups
from batchkv_worker.prefix.shared.worth import ALL, NEEDED, Worth
from batchkv_worker.sequence import Fetch, FetchState, Sequence

log = logging.getLogger("batchkv.cache")

AHEAD_ROWS = 64  # waiting rows that are looked up, the oldest
IDLE_SECONDS = 0.25  # that the engine may always stand still for a block over the network
IDLE_SHARE = 0.015  # of the time that a row's own computing takes
TAKE_BYTES = 128 * 2**20  # of results taken in between two steps, and one more


class StoreClient(PrefixClient):
    """One engine's lookups, leases and writes."""

    def __init__(self, access: Access, loaded: LoadedModel, plan: KvPlan) -> None:
        own = manifest(loaded, plan)
        self.namespace = namespace(own)
        self.root = root_key(self.namespace, access.salt)
        self.block_layout = BlockLayout(plan.kinds)
        self._access = access
        self._store = access.store
        self._floats = FloatBlocks(plan.kinds) if access.adopts_float else None
        if self._floats is not None:
            self._float_namespace = namespace(self._floats.manifest(own))
        self._fetcher = Fetcher(access.store, access.leases, is_shared=access.is_shared)
        layout = self.block_layout
        block_bytes = sum(layout.template(kind).nbytes for kind in layout.kinds)
        self._worth = Worth(access.store, block_bytes, access.writes)
        self.outbox = Outbox(
            *(access.store, self._fetcher.release, layout, self._worth),
            *(self.namespace, self.root, access.writer),
        )
        self._pending = PendingLookups(self._fetcher)
        self._ahead_bytes = 0  # fetched for rows that still wait, or expected
        self._prefixes: PrefixCache | None = None
        self._is_on = self._fits()
        if self._is_on:
            self.on_new, self.counts_shared = self.outbox.add, access.writes != ALL
            access.store.publish_manifest(own)

    def _fits(self) -> bool:
        """Whether this model's blocks can be stored at all."""
        limits, size = self._store.limits, self.block_layout.largest
        if size + limits.max_header_bytes <= limits.max_block_bytes:
            return True
        log.warning(
            "prefixes are not shared: a block of this model takes %.0f MB, and may take %.0f; "
            "another KV scheme takes less",
            *(size / 1e6, limits.max_block_bytes / 1e6),
        )
        return False

    def attach(self, prefixes: PrefixCache) -> None:
        self._prefixes, self._worth.uses = prefixes, prefixes.eviction
        prefixes.on_used = self.outbox.add_late if self._is_on else None
        if not prefixes.max_blocks:
            self._is_on = False
            log.warning("prefixes are not shared: the memory for prefixes holds not one block")

    @property
    def is_busy(self) -> bool:
        return len(self.outbox) > 0 or self._pending.has_answers

    def begin(self, row: Sequence) -> None:
        if row.block_keys and self._is_on:
            row.fetch = Fetch()

    def advance(self, waiting: Iterable[Sequence]) -> None:
        self._take_answers()
        now = time.monotonic()
        for place, row in enumerate(itertools.islice(waiting, AHEAD_ROWS)):
            fetch = row.fetch
            if fetch is None or fetch.state in (FetchState.DONE, FetchState.ASKED):
                continue
            if self.is_ready(row):
                continue
            depth = self._prefix_memory.depth_of(row)
            if not self._pending.may_ask(row.block_keys[depth], now):
                continue
            if not self._has_room(row, fetch, depth, is_first=place == 0):
                break  # a younger row must not take the room that this one waits for
            self._begin_lookup(row, fetch, depth, now)

    def wait(self, timeout_seconds: float) -> None:
        self._pending.wait(timeout_seconds)

    def send(self, *, is_idle: bool, before_waiting: Callable[[], None]) -> None:
        self.outbox.send(is_idle=is_idle, before_waiting=before_waiting)

    def is_ready(self, row: Sequence) -> bool:
        fetch = row.fetch
        if fetch is None or fetch.state is FetchState.DONE:
            return True
        now = time.monotonic()
        if fetch.state is FetchState.ASKED:
            is_late = now - fetch.asked_at > self._access.lookup_seconds
            is_late = is_late or (fetch.is_far and self._is_dear(row))
            return is_late and self._give_up(fetch, "slow")
        depth = self._prefix_memory.depth_of(row)
        # The scheduler makes sure that a block of this worker is computed once.
        if depth == len(row.block_keys) or self.outbox.is_held(row.block_keys[depth]):
            return True
        if self._pending.is_hung:
            return self._give_up(fetch, "slow")  # the store hangs: nobody else waits for it
        if self._pending.is_held(row.block_keys[depth]):
            self._see_held(fetch, depth, now)
            if now - fetch.held_since > self._held_limit(row, depth):
                return self._give_up(fetch, "held")
        return False

    def _is_dear(self, row: Sequence) -> bool:
        """Whether the engine has stood still for too long while no block came over the network.

        The tier may be slower than it was, or of unknown speed. A row waits as long as a small
        share of its own computing takes, or some times as long as a known speed lets expect. The
        lookup goes on without it up to its next block, which tells how quick the tier is.
        """
        idle = self._pending.idle_seconds
        if idle <= 0.0:
            return False
        depth = self._prefix_memory.depth_of(row)
        num_tokens = (len(row.block_keys) - depth) * BLOCK_TOKENS
        seconds = self._store.gate.prefill_seconds(num_tokens)
        if seconds is None:
            return False
        pays = self._worth.pays(row)
        if pays is False and not self._store.has_near:
            return True  # it is a try, which costs this row nothing
        expected = self._worth.far_seconds(STREAM_BYTES) if pays else 0.0
        return idle > max(IDLE_SECONDS, IDLE_SHARE * seconds, 4 * expected)

    def _held_limit(self, row: Sequence, depth: int) -> float:
        """Seconds to wait for another worker that makes no progress.

        It may have the lease on a row that it computes much later. So the wait is no more than
        twice the time that computing takes here: on a fast GPU, less than until the next look.
        """
        num_tokens = (len(row.block_keys) - depth) * BLOCK_TOKENS
        seconds = self._store.gate.prefill_seconds(num_tokens)
        if seconds is None or self._access.writes != NEEDED:
            return self._access.held_seconds
        return min(self._access.held_seconds, 2 * seconds)

    def _see_held(self, fetch: Fetch, depth: int, now: float) -> None:
        """Note since when another worker's lease on the row's next block has made no progress."""
        if fetch.state is not FetchState.HELD or depth > fetch.deepest:
            fetch.state, fetch.stop = FetchState.HELD, "held"
            fetch.held_since, fetch.deepest = now, depth

    def _give_up(self, fetch: Fetch, why: str) -> bool:
        """Stop waiting: the limit is reached. The row is ready."""
        self._pending.give_up(fetch)
        self._expect(fetch, 0, 0)
        fetch.state, fetch.stop = FetchState.DONE, why
        self._store.count(f"gave_up.{why}")
        return True

    def _has_room(self, row: Sequence, fetch: Fetch, depth: int, *, is_first: bool) -> bool:
        """Whether the memory has room for the blocks that may come; for the oldest row always."""
        memory = self._prefix_memory
        others = self._ahead_bytes - fetch.num_bytes
        wanted = (len(row.block_keys) - depth) * memory.block_bytes
        if not is_first and others + wanted > memory.max_bytes // 2:
            return False
        self._expect(fetch, fetch.num_bytes, wanted)
        return True

    def _expect(self, fetch: Fetch, num_bytes: int, num_expected: int) -> None:
        """Count bytes that a row has fetched and not used, and those that may still come."""
        self._ahead_bytes += num_bytes + num_expected - fetch.num_bytes - fetch.num_expected
        fetch.num_bytes, fetch.num_expected = num_bytes, num_expected

    def _begin_lookup(self, row: Sequence, fetch: Fetch, depth: int, now: float) -> None:
        """Look a row up, unless no tier can have what it needs: then it is ready."""
        is_near = not self._worth.may_be_far(row, depth)
        if is_near and not self._store.has_near:
            self._expect(fetch, 0, 0)
            fetch.state, fetch.stop = FetchState.DONE, "alone"
            self._store.count("lookups_spared")
            return
        self._ask(row, fetch, depth, now, is_near)

    def _ask(self, row: Sequence, fetch: Fetch, depth: int, now: float, is_near: bool) -> None:
        fetch.state, fetch.asked_at, fetch.is_far = FetchState.ASKED, now, not is_near
        fetch.deepest = max(fetch.deepest, depth)
        had = self._prefix_memory.pieces(row.block_keys)
        wanted = self.block_layout.wanted(self.namespace, row.block_keys, row.prompt, had)
        floats = None
        if self._floats is not None and self._floats.is_needed:
            root = root_key(self._float_namespace, self._access.salt)
            root = own_root(root, row.cache_salt)
            keys = chain(root, row.prompt[: len(row.block_keys) * BLOCK_TOKENS])
            floats = self.block_layout.wanted(self._float_namespace, keys, row.prompt, had)
        worth = self._worth.num_leased(row)  # leases on no more: they make others wait
        missing = row.block_keys[depth]
        self._pending.ask(row, missing, lambda n: Lookup(n, wanted, worth, floats, is_near))

    def _take_answers(self) -> None:
        """Take in results of lookups, up to TAKE_BYTES."""
        taken = 0
        for asked, answer in self._pending.answers():
            taken += self._take_in(asked, answer)
            if taken > TAKE_BYTES:
                return

    def _take_in(self, asked: PendingLookup, answer: LookupResult) -> int:
        """Take in one result; the bytes that it brought."""
        row, fetch = asked.row, asked.row.fetch
        if fetch is None or row.is_ended or fetch.state is not FetchState.ASKED:
            self._fetcher.release(answer.leases)  # no row waits for it any more
            return 0
        if not answer.is_last:
            return self._take_block(row, fetch, answer)
        was = fetch.depth_before if fetch.depth_before >= 0 else self._prefix_memory.depth_of(row)
        fetch.depth_before = -1
        if not answer.is_near:
            self._worth.note_lookup(has_found=answer.depth > 0 or bool(answer.floats))
        num_bytes = self._adopt(row, answer)
        depth = self._prefix_memory.depth_of(row)
        fetch.count(tiers_of_blocks(answer, range(max(was, fetch.deepest), depth)))
        self._expect(fetch, fetch.num_bytes + num_bytes, 0)
        self.outbox.hold(answer.leases, fetch)
        if not answer.is_held or depth == len(row.block_keys):
            fetch.state, fetch.stop = FetchState.DONE, answer.stop
            return num_bytes
        self._pending.hold_off(row.block_keys[depth])
        now = time.monotonic()
        if depth > fetch.deepest or not fetch.held_since:
            fetch.held_since, fetch.deepest = now, max(depth, fetch.deepest)
        fetch.state, fetch.stop = FetchState.HELD, "held"
        return num_bytes

    def _take_block(self, row: Sequence, fetch: Fetch, answer: LookupResult) -> int:
        """Take in one block of a result whose rest is still on its way; its bytes."""
        if fetch.depth_before < 0:
            fetch.depth_before = self._prefix_memory.depth_of(row)
        num_bytes = self._adopt(row, answer)
        left = max(0, fetch.num_expected - num_bytes)
        self._expect(fetch, fetch.num_bytes + num_bytes, left)
        fetch.asked_at = time.monotonic()  # it is no slow lookup
        return num_bytes

    def _adopt(self, row: Sequence, answer: LookupResult) -> int:
        """Put found blocks into the prefix memory; their bytes there."""
        own = self._bundles(answer.pieces, self.block_layout.bundle)
        self._prefix_memory.adopt(row.block_keys, own, partial=row.partial_keys)
        num_bytes = sum(bundle.nbytes for bundle in own.values())
        if self._floats is not None and answer.floats:
            packed = self._bundles(answer.floats, self._floats.convert)
            partial = row.partial_keys
            self._prefix_memory.adopt(row.block_keys, packed, is_converted=True, partial=partial)
            num_bytes += sum(bundle.nbytes for bundle in packed.values())
            self._store.count("converted", len(packed))
        return num_bytes

    def _bundles(
        self, pieces: Mapping[Piece, Block], unpack: Callable[[Block], Bundle]
    ) -> dict[Piece, Bundle]:
        """Arrays of pieces; pieces with other arrays than this model's are left out."""
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
        """Wait until all that was sent is written; False when the time was up first."""
        return self._store.flush(timeout_seconds)

    def count(self, name: str) -> None:
        self._store.count(name)

    def drop_unsent(self) -> None:
        self.outbox.drop_all()

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        self._store.gate.observe_prefill(num_tokens, seconds)

    def note(self, row: Sequence) -> CacheNote | None:
        fetch, keys = row.fetch, row.block_keys
        if fetch is None:
            return None
        depth = row.num_cached // BLOCK_TOKENS
        found = min(fetch.found, depth)
        counts = (self.namespace, len(keys), depth - found, found, fetch.stop)
        tiers = tuple(fetch.tiers.items())
        if depth == len(keys):
            return CacheNote(*counts, tiers=tiers)
        low = depth * BLOCK_TOKENS
        return CacheNote(
            *counts,
            key=keys[depth],
            parent=keys[depth - 1] if depth else own_root(self.root, row.cache_salt),
            marks=token_marks(row.prompt[low : low + BLOCK_TOKENS]),
            tiers=tiers,
        )

    def forget(self, row: Sequence) -> None:
        fetch = row.fetch
        if fetch is None:
            return
        self._expect(fetch, 0, 0)
        was, fetch.state = fetch.state, FetchState.DONE
        if was is FetchState.ASKED:
            self._pending.abandon(fetch)
            self._take_answers()  # one that was there already has leases
        self.outbox.forget(fetch)

    def close(self) -> None:
        with ExitStack() as steps:  # the last first, and each whatever became of those before
            if not self._access.outlives_engine:
                steps.callback(self._access.close)
            steps.callback(self._fetcher.close, 1.0)
            steps.callback(self.outbox.send_all)
        counts = ", ".join(f"{name} {count}" for name, count in self.counters.items() if count)
        log.info("cache: %s", counts or "not used")

    @property
    def _prefix_memory(self) -> PrefixCache:
        assert self._prefixes is not None, "attach comes first"
        return self._prefixes
