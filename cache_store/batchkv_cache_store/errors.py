"""The cache store's error tree. ``Store.lookup`` and ``Store.publish`` raise none of these.

    CacheStoreError
    ├── BlockRejected         the bytes are not the requested block: a miss, by ``reason``
    └── TierError             a tier did not answer: a miss, and a failure for its breaker
        ├── TierAway          its volume is missing: most likely it is not mounted
        └── TierMisconfigured it cannot work with these settings; the message says what to change

Wrong arguments raise ValueError, as everywhere: they are bugs of the caller.
"""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Why bytes are not the requested block. The values are the names of counters."""

    BAD_MAGIC = "bad_magic"  # another kind of file
    VERSION = "version"  # of a format that this code does not read
    TRUNCATED = "truncated"  # shorter than the sizes in its header
    TRAILING = "trailing"  # longer than the sizes in its header
    LIMITS = "limits"  # its sizes are above the limits of a block
    CHECKSUM = "checksum"  # damaged
    MAC = "mac"  # a secret is set, and the writer of this block did not have it
    NO_SECRET = "no_secret"  # signed, and no secret is set here to check it with
    HEADER = "header"  # ``encode`` does not write such a header
    TENSORS = "tensors"  # the tensor table contradicts itself or the payload
    NAMESPACE = "namespace"  # of another model, scheme or format of cache
    KEY = "key"  # of another block
    KIND = "kind"  # of another kind
    TOKENS = "tokens"  # the key is right, but the tokens differ

    @property
    def is_damage(self) -> bool:
        """Whether no reader can use the block. If only this one cannot, the block stays."""
        return self not in (Reason.NO_SECRET, Reason.VERSION)


class CacheStoreError(Exception):
    """Base of all errors that the cache store raises on purpose."""


class BlockRejected(CacheStoreError):
    """These bytes are not the requested block; ``reason`` says which check failed."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class TierError(CacheStoreError):
    """A call of a tier failed for a reason outside of this process."""


class TierAway(TierError):
    """The volume or folder that should contain a tier is missing now."""


class TierMisconfigured(TierError):
    """A tier cannot be used with its settings; the message says what to change."""
