"""All tiers behind one face: look up a prompt's prefix, publish its blocks.

Nothing here fails, delays or corrupts a job. What a tier cannot do, or a block is not, is a miss
with a counted reason; only wrong arguments raise (ValueError). Writing is a background thread's
work. The counters, T being a tier's name:

=====================  ==========================================================================
``lookups``            calls of ``lookup``; ``lookups_empty`` those that found nothing
``wanted_blocks``      blocks of all prompts looked up; ``found_blocks`` those found of them
``hit.T``              pieces (a block has one of each kind) that came from the tier
``rejected.<reason>``  bytes that were not the block asked for (``errors.Reason``)
``gated``              lookups cut short since computing was expected to be quicker
``published``          blocks queued for writing; ``dropped`` what found the queue full
``promoted``           hits queued for the faster tiers; ``not_promoted`` when the queue was full
``given_up``           writes that were still waiting when the time to close was up
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
from batchkv_cache_store.lookup import Found, Hit, Search, Wanted
from batchkv_cache_store.tiers.base import Tier, TierStats
from batchkv_cache_store.writer import Taken, WriteBehind


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """``max_queued_bytes``: of blocks that wait to be written. Cooldowns: see ``breaker``."""

    max_queued_bytes: int = 512 * 1024 * 1024
    max_failures: int = 3
    cooldown_seconds: float = 5.0
    max_cooldown_seconds: float = 300.0
    limits: Limits = field(default_factory=Limits)


class Store:
    """Blocks in ``tiers``, fast to slow. Safe to share by threads; the store closes its tiers.

    ``secret`` (16 bytes or more) signs blocks and refuses those that it did not sign.
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
        self._writer = WriteBehind(self._settings.max_queued_bytes)

    def _new_breaker(self, clock: Callable[[], float]) -> Breaker:
        settings = self._settings
        return Breaker(
            settings.max_failures,
            settings.cooldown_seconds,
            settings.max_cooldown_seconds,
            clock,
        )

    def lookup(self, wanted: Wanted) -> Found:
        """The longest prefix worth loading, decoded; its tensors are views that keep it alive.

        Blocks for as long as the tiers take: not for the thread that decodes.
        """
        search = Search(
            wanted, self._tiers, self.gate, self._sealer, self._settings.limits, self._counters
        )
        found = search.run()
        self._counters.add("lookups")
        self._counters.add("lookups_empty", not found.depth)
        self._counters.add("gated", found.stop == "gated")
        self._counters.add("wanted_blocks", len(wanted.keys))
        self._counters.add("found_blocks", found.depth)
        for hit in search.hits:
            self._counters.add(f"hit.{self._tiers[hit.tier].name}")
        self._promote(search.hits)
        return found

    def publish(self, block: Block, on_end: Callable[[], None] | None = None) -> bool:
        """Queue a block for all tiers; False when the queue is full and the block was dropped.

        The block's buffers are read later: nobody may change them. ``on_end`` is called by the
        writer's thread when the block was written, or could not be; not for one that is dropped.
        One that is being written already is not queued again, and its end is told all the same.
        ValueError for a block that breaks the format's limits.
        """
        num_bytes = encoded_size(block, self._settings.limits)
        name = block_name(block.key, block.kind)

        taken = self._writer.submit(name, num_bytes, lambda: self._write(name, block), on_end)
        if taken is not Taken.KNOWN:
            self._counters.add("published" if taken is Taken.QUEUED else "dropped")
        return taken is not Taken.REFUSED

    @property
    def limits(self) -> Limits:
        """What a block may have at most."""
        return self._settings.limits

    def has_room(self, num_bytes: int) -> bool:
        """Whether that many more bytes may wait to be written, and any tier would take them now."""
        if all(tier.breaker.is_resting for tier in self._tiers):
            return False
        return self._writer.num_bytes + num_bytes <= self._settings.max_queued_bytes

    def count(self, name: str, amount: int = 1) -> None:
        """Count what the store's user saw: a block of another shape, a lookup that it gave up."""
        self._counters.add(name, amount)

    def publish_manifest(self, manifest: Manifest) -> bytes:
        """Queue a manifest for all tiers; returns the digest of its namespace.

        ValueError for a manifest of more than 64 KiB.
        """
        digest, text = encode_manifest(manifest)
        name = manifest_name(digest)
        taken = self._writer.submit(name, len(text), lambda: self._put(name, text, self._tiers))
        self._counters.add("dropped", taken is Taken.REFUSED)
        return digest

    def counters(self) -> dict[str, int]:
        """All counters by name."""
        return self._counters.snapshot()

    def tier_stats(self) -> dict[str, TierStats | None]:
        """What each tier holds, None for one in trouble; may take a walk through a folder."""
        return {tier.name: tier.stats() for tier in self._tiers}

    def open_breakers(self) -> list[str]:
        """Names of tiers that are left alone at present."""
        return [tier.name for tier in self._tiers if not tier.breaker.is_closed]

    @property
    def num_queued_bytes(self) -> int:
        """Bytes that wait to be written."""
        return self._writer.num_bytes

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until everything published is written; False when the time was up first."""
        return self._writer.flush(timeout_seconds)

    def close(self, timeout_seconds: float) -> bool:
        """Write what waits for that long, then close the tiers; False when writes were given up."""
        num_left = self._writer.close(timeout_seconds)
        self._counters.add("given_up", num_left)
        for tier in self._tiers:
            tier.tier.close()
        return not num_left

    def _write(self, name: str, block: Block) -> None:
        data = join(encode(block, self._sealer, self._settings.limits))
        self._put(name, data, self._tiers)

    def _promote(self, hits: Sequence[Hit]) -> None:
        """Put what slow tiers had into the faster ones: instant ones now, the others behind.

        A chain's tail is worth nothing without its head. So heads are put last where the latest
        put stays longest, and first where a full queue drops what comes last.
        """
        for hit in reversed(hits):
            for tier in self._tiers[: hit.tier]:
                if tier.tier.is_instant:
                    tier.put(hit.name, [hit.data])
        for hit in hits:
            behind = [tier for tier in self._tiers[: hit.tier] if not tier.tier.is_instant]
            if behind:
                self._promote_behind(hit, behind)

    def _promote_behind(self, hit: Hit, tiers: Sequence[GuardedTier]) -> None:
        def write() -> None:
            self._put(hit.name, hit.data, tiers)

        taken = self._writer.submit(hit.name, len(hit.data), write)
        self._counters.add("not_promoted" if taken is Taken.REFUSED else "promoted")

    def _put(self, name: str, data: Buffer, tiers: Sequence[GuardedTier]) -> None:
        for tier in tiers:
            tier.put(name, [data])
