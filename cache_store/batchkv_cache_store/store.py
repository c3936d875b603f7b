"""All tiers as one store: ``lookup`` finds a prompt's prefix, ``publish`` stores its blocks.

The store never fails, delays or corrupts a job. A failing tier or a damaged block is a miss with a
counted reason. Only wrong arguments raise (ValueError). A background thread writes. The counters,
where T is a tier's name:

=====================  ==========================================================================
``lookups``            calls of ``lookup``; ``lookups_empty``: those that found nothing
``wanted_blocks``      blocks of all prompts looked up; ``found_blocks``: those that were found
``hit.T``              pieces (a block has one of each kind) that were loaded from the tier
``lookups_spared``     rows that were not looked up: no tier could have what they need
``not_needed``         blocks that no other worker needs, or computes as quickly as it loads them
``rejected.<reason>``  objects that were not the requested block (``errors.Reason``)
``gated``              lookups that loaded less, because computing was expected to be quicker
``published``          blocks queued for writing; ``dropped``: those that found the queue full
``promoted``           hits queued for faster tiers; ``not_promoted``: the queue was full
``given_up``           writes that still waited when the time to close was over
``error.T`` ...        see ``guarded``
=====================  ==========================================================================
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from batchkv_cache_store.blocks.block import Block, Limits, encode, encoded_size, join
from batchkv_cache_store.blocks.manifests import encode_manifest
from batchkv_cache_store.blocks.names import block_name, manifest_name
from batchkv_cache_store.blocks.seal import Buffer, Sealer
from batchkv_cache_store.breaker import Breaker
from batchkv_cache_store.guarded import Counters, GuardedTier
from batchkv_cache_store.keys import Manifest
from batchkv_cache_store.load_or_compute import Gate
from batchkv_cache_store.lookup import Found, HandOver, Hit, Search, Wanted
from batchkv_cache_store.tiers.base import Tier, TierStats
from batchkv_cache_store.writer import SubmitResult, WriteBehind


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """``max_queued_bytes``: of blocks that wait for the writer. Cooldowns: see ``breaker``.

    ``max_write_bytes_per_second``: on average, of all tiers together.
    """

    max_queued_bytes: int = 512 * 1024 * 1024
    max_write_bytes_per_second: float = 300e6
    max_failures: int = 3
    cooldown_seconds: float = 5.0
    max_cooldown_seconds: float = 300.0
    limits: Limits = field(default_factory=Limits)


class Store:
    """Blocks in ``tiers``, fast to slow. Threads may share a store. The store closes its tiers.

    With a ``secret`` (16 bytes or more) it signs blocks and refuses blocks without its signature.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        secret: bytes | None = None,
        gate: Gate | None = None,
        settings: StoreSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if len({tier.name for tier in tiers}) != len(tiers):
            raise ValueError("two tiers of one name")
        self._settings = settings or StoreSettings()
        self.gate = gate or Gate()
        self._sealer = Sealer(secret)
        self._counters = Counters()
        self._tiers = [
            GuardedTier(tier, self._new_breaker(clock), self.gate, self._counters) for tier in tiers
        ]
        self._num_near = next((n for n, tier in enumerate(tiers) if tier.is_far), len(tiers))
        self._writer = WriteBehind(
            self._settings.max_queued_bytes, self._settings.max_write_bytes_per_second
        )

    def _new_breaker(self, clock: Callable[[], float]) -> Breaker:
        settings = self._settings
        return Breaker(
            settings.max_failures,
            settings.cooldown_seconds,
            settings.max_cooldown_seconds,
            clock,
        )

    def lookup(
        self, wanted: Wanted, *, is_near: bool = False, hand_over: HandOver | None = None
    ) -> Found:
        """Load and decode the longest prefix worth loading. Tensors are views that keep its bytes.

        ``is_near``: look only into the tiers before the first far one. ``hand_over`` is called with
        pieces of kind ``kv`` as they arrive, and may wait. It waits for the tiers, so do not call
        it on the thread that decodes.
        """
        tiers = self._tiers[: self._num_near] if is_near else self._tiers
        search = Search(
            *(wanted, tiers, self.gate, self._sealer, self._settings.limits, self._counters),
            hand_over,
        )
        found = search.run()
        self._counters.add("lookups")
        self._counters.add("lookups_empty", not found.depth)
        self._counters.add("gated", found.stop == "gated")
        self._counters.add("wanted_blocks", len(wanted.keys))
        self._counters.add("found_blocks", found.depth)
        for tier, num_hits in search.num_hits.items():
            self._counters.add(f"hit.{self._tiers[tier].name}", num_hits)
        self._promote(search.hits)
        return found

    def publish(self, block: Block, on_end: Callable[[], None] | None = None) -> bool:
        """Queue a block for all tiers. Returns False if the queue is full; the block is dropped.

        The block's buffers are read later, so they must not change. The writer's thread calls
        ``on_end`` when the write has ended, well or not. It does not call it for a dropped block.
        If the block is in the queue already, it is not queued again, and ``on_end`` is called after
        that write. Raises ValueError for a block that exceeds the format's limits.
        """
        num_bytes = encoded_size(block, self._settings.limits)
        name = block_name(block.key, block.kind)
        return self.publish_later(name, num_bytes, lambda: block, on_end)

    def publish_later(
        self,
        name: str,
        num_bytes: int,
        make: Callable[[], Block],
        on_end: Callable[[], None] | None = None,
        *,
        is_near: bool = False,
    ) -> bool:
        """``publish`` for a block that the writer's thread makes, when its turn has come.

        ``name``: its ``block_name``; ``num_bytes``: about its size. ``is_near``: far tiers do not
        get it. What ``make`` raises is logged, and the block is not stored.
        """
        tiers = self._tiers[: self._num_near] if is_near else self._tiers
        result = self._writer.submit(
            name, num_bytes, lambda: self._write(name, make(), tiers), on_end
        )
        if result is not SubmitResult.KNOWN:
            self._counters.add("published" if result is SubmitResult.QUEUED else "dropped")
        return result is not SubmitResult.REFUSED

    @property
    def has_near(self) -> bool:
        """Whether a tier comes before the first far one."""
        return self._num_near > 0

    @property
    def has_far(self) -> bool:
        """Whether there is a tier that is for other workers."""
        return self._num_near < len(self._tiers)

    def far_pays(self, num_tokens: int, num_bytes: int, slowdown: float = 1.0) -> bool | None:
        """``Gate.pays`` of the far tiers: True if one pays, None if that is not known."""
        far = self._tiers[self._num_near :]
        verdicts = {self.gate.pays(one.name, num_tokens, num_bytes, slowdown) for one in far}
        return True if True in verdicts else None if None in verdicts else False

    def far_seconds(self, num_bytes: int) -> float:
        """The expected time of a load from the slowest far tier; 0 if nothing is known of it."""
        far = self._tiers[self._num_near :]
        return max((self.gate.load_seconds(one.name, num_bytes) for one in far), default=0.0)

    @property
    def limits(self) -> Limits:
        """The limits of a block's sizes."""
        return self._settings.limits

    def has_room(self, num_bytes: int) -> bool:
        """Whether so many more bytes fit into the queue, and a tier would store them now."""
        if all(tier.breaker.is_cooling_down for tier in self._tiers):
            return False
        return self._writer.num_bytes + num_bytes <= self._settings.max_queued_bytes

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter for the store's user, for example blocks whose shapes do not fit."""
        self._counters.add(name, amount)

    def publish_manifest(self, manifest: Manifest) -> bytes:
        """Queue a manifest for all tiers. Returns the digest of its namespace.

        Raises ValueError for a manifest of more than 64 KiB.
        """
        digest, text = encode_manifest(manifest)
        name = manifest_name(digest)
        result = self._writer.submit(name, len(text), lambda: self._put(name, text, self._tiers))
        self._counters.add("dropped", result is SubmitResult.REFUSED)
        return digest

    def counters(self) -> dict[str, int]:
        """All counters by name."""
        return self._counters.snapshot()

    def tier_stats(self) -> dict[str, TierStats | None]:
        """The contents of each tier; None for a failing one. A disk tier walks its folder."""
        return {tier.name: tier.stats() for tier in self._tiers}

    def open_breakers(self) -> list[str]:
        """Names of the tiers that failed and are not used now."""
        return [tier.name for tier in self._tiers if not tier.breaker.is_closed]

    @property
    def num_queued_bytes(self) -> int:
        """Bytes that wait for the writer or are being written."""
        return self._writer.num_bytes

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until all published blocks are written. Returns False if the time was over first."""
        return self._writer.flush(timeout_seconds)

    def close(self, timeout_seconds: float) -> bool:
        """Write queued blocks for at most so long, then close the tiers.

        Returns False if some were not written.
        """
        num_left = self._writer.close(timeout_seconds)
        self._counters.add("given_up", num_left)
        for tier in self._tiers:
            tier.tier.close()
        return not num_left

    def _write(self, name: str, block: Block, tiers: Sequence[GuardedTier]) -> None:
        parts = encode(block, self._sealer, self._settings.limits)
        if any(tier.tier.is_instant for tier in tiers):
            parts = [join(parts)]  # a tier in memory keeps these bytes, and copies no others
        for tier in tiers:
            tier.put(name, parts, is_timed=True)

    def _promote(self, hits: Sequence[Hit]) -> None:
        """Copy hits of slow tiers into the faster ones: instant tiers now, others by the writer.

        A chain's tail is of no use without its head. An instant tier evicts the oldest, so heads
        are put last there. A full queue drops the latest, so heads are queued first.
        """
        for hit in reversed(hits):
            for tier in self._tiers[: hit.tier]:
                if tier.tier.is_instant:
                    tier.put(hit.name, [hit.data])
        for hit in hits:
            slower = [tier for tier in self._tiers[: hit.tier] if not tier.tier.is_instant]
            if slower:
                self._queue_promotion(hit, slower)

    def _queue_promotion(self, hit: Hit, tiers: Sequence[GuardedTier]) -> None:
        def write() -> None:
            self._put(hit.name, hit.data, tiers)

        result = self._writer.submit(hit.name, len(hit.data), write)
        self._counters.add("not_promoted" if result is SubmitResult.REFUSED else "promoted")

    def _put(self, name: str, data: Buffer, tiers: Sequence[GuardedTier]) -> None:
        for tier in tiers:
            tier.put(name, [data])
