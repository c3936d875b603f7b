"""A worker's note about a row's hits in the shared cache, so that misses can be explained later.

The prompt itself is gone when a row has ended. So the note describes the first block that was
missing. It has the key of that block, the key of its parent, and one byte for each of its tokens:
the low byte of a CRC over the tokens up to it. Two blocks differ from the first token on whose
marks differ. One difference in 256 is not seen at its own token, but at a later one.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any


@dataclass(frozen=True, slots=True)
class CacheNote:
    """Counts are of full blocks of the prompt that could be shared.

    ``wanted``: all of them. ``local``: those in the worker's own memory before the lookup.
    ``found``: those read from the store. ``stop``: why there were no more
    (``batchkv_cache_store.lookup.Found``; "held": another worker was computing the block and made
    no progress; "slow": no answer came in time; "alone": no tier was asked). ``key`` is that of the
    first missing block; b"" if none was missing. ``tiers``: how many of ``found`` came from each
    tier, by its name. A result stores them apart, because older readers know eight values at most.
    """

    namespace: bytes
    wanted: int
    local: int
    found: int
    stop: str = ""
    key: bytes = b""
    parent: bytes = b""
    marks: bytes = b""
    tiers: tuple[tuple[str, int], ...] = ()

    def packed(self) -> list[Any]:
        """The note as a result stores it, without ``tiers``."""
        counts = [self.namespace, self.wanted, self.local, self.found, self.stop]
        return [*counts, self.key, self.parent, self.marks] if self.key else counts

    @classmethod
    def unpacked(cls, values: Sequence[Any], tiers: Mapping[Any, Any]) -> CacheNote:
        """Inverse of ``packed``; an ordinary error for anything else."""
        namespace, wanted, local, found, stop, *last = values
        key, parent, marks = last or (b"", b"", b"")
        for digest in (namespace, key, parent, marks):
            if not isinstance(digest, bytes):  # bytes(n) would return n zeros
                raise TypeError("a digest is not bytes")
        counts = index(wanted), index(local), index(found)
        found_in = tuple((str(name), index(num)) for name, num in tiers.items())
        if any(num < 0 for _, num in found_in):
            raise ValueError("a count is negative")
        return cls(namespace, *counts, str(stop), key, parent, marks, found_in)


def token_marks(tokens: Sequence[int]) -> bytes:
    """One byte for each token id, of all tokens up to it."""
    marks, state = bytearray(), 0
    for token in tokens:
        state = zlib.crc32(struct.pack("<I", token), state)
        marks.append(state & 0xFF)
    return bytes(marks)
