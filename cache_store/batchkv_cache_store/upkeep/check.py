"""Reads stored blocks in full and checks them."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from batchkv_cache_store.blocks.block import Block, Limits, decode_any
from batchkv_cache_store.blocks.manifests import decode_manifest
from batchkv_cache_store.blocks.names import digest_of, is_manifest_name, kind_of
from batchkv_cache_store.blocks.seal import Buffer, Sealer
from batchkv_cache_store.errors import BlockRejected, Reason
from batchkv_cache_store.tiers.base import Entry, Tier
from batchkv_cache_store.upkeep.contents import batches

MAX_BATCH_BYTES = 64 * 1024 * 1024
# These are no damage: the format, or the secret of the signature, is not known here.
UNCHECKED = frozenset({Reason.VERSION, Reason.NO_SECRET})


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a check; ``reason`` None: the object is whole and has the right name."""

    entry: Entry
    reason: Reason | None = None
    detail: str = ""

    @property
    def is_damaged(self) -> bool:
        """Whether no reader can use the block."""
        return self.reason is not None and self.reason not in UNCHECKED


def check_all(
    tier: Tier, entries: Iterable[Entry], sealer: Sealer, limits: Limits | None = None
) -> Iterator[Verdict]:
    """A verdict for each entry that is still in the tier. The reads do not count as uses."""
    limits = limits or Limits()
    for batch in batches(entries, MAX_BATCH_BYTES):
        # One byte more than its size, or its limit, shows that a block is too long.
        most = min(limits.max_block_bytes, max(entry.num_bytes for entry in batch))
        found = tier.get_heads([entry.name for entry in batch], most + 1)
        for entry in batch:
            if entry.name in found:
                yield _verdict(entry, found[entry.name], sealer, limits)


def _verdict(entry: Entry, data: Buffer, sealer: Sealer, limits: Limits) -> Verdict:
    try:
        if not is_manifest_name(entry.name):
            check_block(entry.name, data, sealer, limits)
        elif decode_manifest(data, digest_of(entry.name)) is None:
            raise BlockRejected(Reason.CHECKSUM, "not the manifest of its name")
    except BlockRejected as fault:
        return Verdict(entry, fault.reason, str(fault))
    return Verdict(entry)


def check_block(name: str, data: Buffer, sealer: Sealer, limits: Limits | None = None) -> Block:
    """Decode the block of that name; raises BlockRejected if these bytes are not that block."""
    block = decode_any(data, sealer, limits)
    if block.key != digest_of(name):
        raise BlockRejected(Reason.KEY, f"it is {block.key.hex()[:16]}")
    if block.kind != kind_of(name):
        raise BlockRejected(Reason.KIND, f"it is {block.kind}")
    return block


def parse_sample(text: str) -> int | float:
    """A number of blocks ("500"), or their share ("5%", "0.05"); raises ValueError."""
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)(%?)", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is neither a number of blocks nor a share like 5%")
    if not match[2] and "." not in match[1]:
        number = int(match[1])
        if number < 1:
            raise ValueError("a sample has at least one block")
        return number
    share = float(match[1]) / (100 if match[2] else 1)
    if not 0 < share <= 1:
        raise ValueError("a share is more than 0 and at most 100%")
    return share


def sample(entries: Iterable[Entry], size: int | float) -> Iterable[Entry]:
    """A random sample: so many entries (int), or each with that probability (float)."""
    if isinstance(size, float):
        return (entry for entry in entries if random.random() < size)
    kept: list[Entry] = []
    for number, entry in enumerate(entries):  # Vitter's algorithm R
        if number < size:
            kept.append(entry)
        elif (place := random.randrange(number + 1)) < size:
            kept[place] = entry
    return kept
