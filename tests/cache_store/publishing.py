"""The code of another process, importable by name, as a spawned process needs it."""

from __future__ import annotations

from pathlib import Path

from batchkv_cache_store.blocks.block import Block
from batchkv_cache_store.lookup import Wanted
from batchkv_cache_store.store import Store
from batchkv_cache_store.tiers.disk import DiskTier
from batchkv_cache_store.tiers.memory import MemoryTier
from cache_store.blocks import NAMESPACE, chain_of

FLUSH_SECONDS = 30.0


def wanted(blocks: list[Block]) -> Wanted:
    """What a prompt of these blocks asks for."""
    return Wanted(NAMESPACE, [b.key for b in blocks], [b.tokens for b in blocks])


def publish_many(root: str, seed: int) -> None:
    """A worker that publishes and looks up chains which others publish, too."""
    store = Store([MemoryTier(20_000), DiskTier(Path(root), 30 * 4096)])
    for number in range(30):
        blocks = chain_of([(number * seed + place // 4) % 7 for place in range(24)])
        for block in blocks:
            store.publish(block)
        found = store.lookup(wanted(blocks))
        assert list(found.kv) == blocks[: found.depth]
    assert store.close(FLUSH_SECONDS)
    counters = store.counters()
    assert not [name for name in counters if name.startswith(("rejected", "error"))], counters
