"""Reads from the tiers what they hold around the first missing block of a prompt.

Only the heads of blocks are read, never their tensors. The reads do not count as uses.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import islice, takewhile

from batchkv_cache_store.blocks.block import Kind
from batchkv_cache_store.blocks.names import block_name, digest_of, is_manifest_name, kind_of
from batchkv_cache_store.blocks.peek import Head, peek
from batchkv_cache_store.blocks.seal import Buffer
from batchkv_cache_store.errors import BlockRejected
from batchkv_cache_store.keys import BLOCK_TOKENS, Manifest
from batchkv_cache_store.tiers.base import Tier
from batchkv_cache_store.upkeep.contents import iter_heads, read_manifests
from batchkv_producer.wire.cache_note import CacheNote, token_marks

MAX_ITEMS = 200_000  # of one tier, whose heads are read
_MAX_VALUE_CHARACTERS = 40  # of a manifest's field that is shown in full
_FIRST_TOKENS = 8
_HEAD_BYTES = 4 * BLOCK_TOKENS + 1024  # all fields before the tensors, of a block of batchkv


class Look:
    """The tiers' blocks of a note's namespace, and around its first missing block.

    Times are milliseconds since 1970 by the writers' clocks; None if nothing was found.
    ``max_items``: the most objects that are read of a tier. ``is_partial``: whether a tier has
    more. The caller sets it, too, if a tier failed.
    """

    def __init__(self, note: CacheNote, max_items: int = MAX_ITEMS) -> None:
        self.pieces: dict[Kind, Head] = {}  # of the missing block
        self.siblings: dict[bytes, tuple[int, int]] = {}  # by key: tokens in common, time
        self.child_ms: int | None = None  # of the oldest block that follows the missing one
        self.block_ms: int | None = None  # of the oldest block of the namespace
        self.other_root_ms: int | None = None  # of the oldest head of another tenant's chains
        self.manifests: dict[bytes, Manifest] = {}
        self.num_evicted: dict[str, int] = {}  # by the tier's name
        self.is_partial = False
        self.max_items = max_items
        self._note = note

    def add(self, name: str, tier: Tier) -> None:
        """Read a tier, which users know by that name; raises TierError."""
        # The block is also read by its name, in case it is not among the first ``max_items``.
        names = [block_name(self._note.key, kind) for kind in Kind]
        for found, data in tier.get_heads(names, _HEAD_BYTES).items():
            head = _head(found, data)
            if head is not None and head.links.namespace == self._note.namespace:
                known = self.pieces.get(head.kind, head)
                self.pieces[head.kind] = min(known, head, key=lambda piece: piece.time_ms)
                self._add_block(head)
        self.num_evicted[name] = tier.stats().num_evicted
        namespaces: set[bytes] = set()
        entries = tier.iter_names()
        for entry, data in iter_heads(tier, islice(entries, self.max_items), _HEAD_BYTES):
            if is_manifest_name(entry.name):
                namespaces.add(digest_of(entry.name))
                continue
            head = _head(entry.name, data)
            # A block that is too short or too long cannot be used.
            if head is not None and head.num_bytes == entry.num_bytes:
                self._add_block(head)
        self.is_partial = self.is_partial or next(entries, None) is not None
        self.manifests |= read_manifests(tier, namespaces)

    def nearest(self, namespace: bytes) -> list[str]:
        """The fields in which a namespace's manifest differs from the most similar other one.

        Empty if one of the two is missing.
        """
        own = self.manifests.get(namespace)
        others = [each for space, each in sorted(self.manifests.items()) if space != namespace]
        return min((_differences(own, each) for each in others), key=len, default=[]) if own else []

    def _add_block(self, head: Head) -> None:
        note, links = self._note, head.links
        if links.namespace != note.namespace:
            return
        self.block_ms = _older(self.block_ms, head)
        if links.parent == note.key:
            self.child_ms = _older(self.child_ms, head)
        elif links.parent == note.parent and links.key != note.key:
            common, known_ms = self.siblings.get(links.key) or (_num_common(note, head), None)
            self.siblings[links.key] = common, _older(known_ms, head)
        elif links.parent != note.parent and head.index == 0:
            self.other_root_ms = _older(self.other_root_ms, head)


def _head(name: str, data: Buffer) -> Head | None:
    """The head of the block of that name; None if it is unreadable or another block's."""
    try:
        head = peek(data)
    except BlockRejected:
        return None
    is_its_own = head.links.key == digest_of(name) and head.kind == kind_of(name)
    return head if is_its_own else None


def _older(known_ms: int | None, head: Head) -> int:
    return head.time_ms if known_ms is None else min(known_ms, head.time_ms)


def _num_common(note: CacheNote, head: Head) -> int:
    """The number of the missing block's first tokens that this one has, too, by their marks."""
    tokens: Sequence[int] = struct.unpack(f"<{head.num_tokens}I", head.tokens)
    common = 0
    for size in (_FIRST_TOKENS, len(tokens)):  # most blocks differ early, and all marks take time
        pairs = zip(note.marks, token_marks(tokens[:size]), strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if common < size:
            break
    return common


def _differences(own: Manifest, other: Manifest) -> list[str]:
    """The fields that differ, each with both values if these are short."""
    names = sorted(own.keys() | other.keys())
    return [_difference(n, own.get(n), other.get(n)) for n in names if own.get(n) != other.get(n)]


def _difference(name: str, own: object, other: object) -> str:
    if isinstance(own, list) and isinstance(other, list):
        pairs = enumerate(zip(own, other, strict=False))
        first = next((n for n, pair in pairs if pair[0] != pair[1]), min(len(own), len(other)))
        return f"{name} (first in layer {first})" if name == "layers" else name
    texts = ["nothing" if value is None else str(value) for value in (own, other)]
    is_short = all(len(text) <= _MAX_VALUE_CHARACTERS for text in texts)
    return f"{name} ({texts[0]} here, {texts[1]} there)" if is_short else name
