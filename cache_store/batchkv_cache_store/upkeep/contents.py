"""Lists the contents of a tier, for commands that manage a cache.

Tiers are read in batches, so that a cache of any size needs little memory. The reads do not count
as uses. The headers of blocks are read without checks (``peek``); ``check`` makes the checks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice

from batchkv_cache_store.blocks.block import Kind, Limits, read_sections
from batchkv_cache_store.blocks.manifests import MAX_MANIFEST_BYTES, decode_manifest
from batchkv_cache_store.blocks.names import (
    block_name,
    digest_of,
    is_manifest_name,
    kind_of,
    manifest_name,
)
from batchkv_cache_store.blocks.peek import HEAD_BYTES, LINKS_BYTES, Head, Links, peek, peek_links
from batchkv_cache_store.blocks.seal import Buffer
from batchkv_cache_store.errors import BlockRejected, Reason
from batchkv_cache_store.keys import Manifest
from batchkv_cache_store.tiers.base import Entry, Tier

NAMES_AT_ONCE = 64
_CHAINED = (Kind.KV, Kind.WINDOW)


def batches(entries: Iterable[Entry], max_bytes: int | None = None) -> Iterator[list[Entry]]:
    """Entries in lists of at most 64, and at most ``max_bytes``, unless a single one has more.

    Each entry counts as much as the largest one, because so many bytes are read of each.
    """
    batch: list[Entry] = []
    largest = 0
    for entry in entries:
        most = max(largest, entry.num_bytes)
        is_over = max_bytes is not None and most * (len(batch) + 1) > max_bytes
        if batch and (is_over or len(batch) == NAMES_AT_ONCE):
            yield batch
            batch, most = [], entry.num_bytes
        batch.append(entry)
        largest = most
    if batch:
        yield batch


def iter_heads(
    tier: Tier, entries: Iterable[Entry], num_bytes: int
) -> Iterator[tuple[Entry, Buffer]]:
    """Each entry with its first bytes, without entries that are gone by now."""
    for batch in batches(entries):
        heads = tier.get_heads([entry.name for entry in batch], num_bytes)
        yield from ((entry, heads[entry.name]) for entry in batch if entry.name in heads)


@dataclass(frozen=True, slots=True)
class Item:
    """A name in a tier, with its namespace; ``reason`` says why the header cannot be read."""

    entry: Entry
    namespace: bytes | None
    links: Links | None = None
    reason: Reason | None = None


def iter_items(tier: Tier, entries: Iterable[Entry] | None = None) -> Iterator[Item]:
    """The tier's contents (or those of ``entries``), with the namespace of each."""
    entries = tier.iter_names() if entries is None else entries
    for entry, head in iter_heads(tier, entries, LINKS_BYTES):
        yield _item(entry, head)


def _item(entry: Entry, head: Buffer) -> Item:
    if is_manifest_name(entry.name):
        return Item(entry, digest_of(entry.name))
    try:
        links = peek_links(head)
        num_bytes = read_sections(memoryview(head), Limits()).num_bytes
    except BlockRejected as fault:
        return Item(entry, None, reason=fault.reason)
    if entry.num_bytes != num_bytes:
        is_short = entry.num_bytes < num_bytes
        return Item(entry, None, reason=Reason.TRUNCATED if is_short else Reason.TRAILING)
    if links.key != digest_of(entry.name):
        return Item(entry, None, reason=Reason.KEY)
    return Item(entry, links.namespace, links)


@dataclass(slots=True)
class Tally:
    """Counts and bytes by kind; the bytes are those of the objects, not of the disk."""

    counts: Counter[str] = field(default_factory=Counter)
    num_bytes: Counter[str] = field(default_factory=Counter)

    def add(self, entry: Entry) -> None:
        """Count one entry."""
        kind = kind_of(entry.name)
        self.counts[kind] += 1
        self.num_bytes[kind] += entry.num_bytes


def read_manifests(tier: Tier, namespaces: Iterable[bytes]) -> dict[bytes, Manifest]:
    """The manifests of these namespaces, as far as the tier holds them undamaged."""
    names = {manifest_name(namespace): namespace for namespace in namespaces}
    found: dict[bytes, Manifest] = {}
    waiting = iter(names)
    while batch := list(islice(waiting, NAMES_AT_ONCE)):
        for name, data in tier.get_heads(batch, MAX_MANIFEST_BYTES + 1).items():
            manifest = decode_manifest(data, names[name])
            if manifest is not None:
                found[names[name]] = manifest
    return found


def find_names(tiers: Iterable[Tier], digits: str) -> dict[str, list[Tier]]:
    """Names that begin with these hex digits, each with the tiers that hold it.

    With all 64 digits, this makes one call to each tier. With fewer, it lists all names.
    """
    found: dict[str, list[Tier]] = {}
    for tier in tiers:
        names: Iterable[str]
        if len(digits) == 64:
            kinds = ("kv", "window", "state", "manifest")
            names = tier.get_heads([f"{digits}.{kind}" for kind in kinds], 1)
        else:
            names = (e.name for e in tier.iter_names() if e.name.startswith(digits))
        for name in set(names):  # a listing may contain a name twice
            found.setdefault(name, []).append(tier)
    return dict(sorted(found.items()))


def chain_names(tier: Tier, key: bytes) -> tuple[list[str], bool]:
    """Names of the stored blocks before this one, and whether none is missing.

    They are of kinds ``kv`` and ``window``; a state needs no blocks before it.
    """
    names: list[str] = []
    head = _head(tier, key, _CHAINED)
    while head is not None and head.index > 0:
        parent = head.links.parent
        before = _head(tier, parent, _CHAINED)
        if before is None or before.index >= head.index:
            return names, False
        names += tier.contains_many([block_name(parent, kind) for kind in _CHAINED])
        head = before
    return names, True


def _head(tier: Tier, key: bytes, kinds: Iterable[Kind]) -> Head | None:
    """The head of the first of these kinds that is stored and can be read."""
    heads = tier.get_heads([block_name(key, kind) for kind in kinds], HEAD_BYTES)
    for data in heads.values():
        with suppress(BlockRejected):
            return peek(data)
    return None
