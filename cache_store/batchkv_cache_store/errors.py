"""The cache store's error tree. None of these leaves ``Store.lookup`` or ``Store.publish``.

    CacheStoreError
    ├── BlockRejected         bytes that are not the block asked for: a miss, by ``reason``
    └── TierError             a tier could not answer: a miss, and a mark against the tier
        ├── TierAway          what it lies in is missing: a volume that is not mounted, most likely
        └── TierMisconfigured it never will with these settings; the message says what to change

Wrong arguments are ValueError, as everywhere: they are bugs of the caller.
"""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Why bytes are not the block that was asked for. The values are the names of counters."""

    BAD_MAGIC = "bad_magic"  # another kind of file
    VERSION = "version"  # of a format that this code does not read
    TRUNCATED = "truncated"  # shorter than its own sizes say
    TRAILING = "trailing"  # longer than its own sizes say
    LIMITS = "limits"  # its sizes are above what a block may have
    CHECKSUM = "checksum"  # damaged
    MAC = "mac"  # a secret is set, and whoever wrote this did not know it
    NO_SECRET = "no_secret"  # signed, and no secret is set here to check it with
    HEADER = "header"  # the header is not what encode writes
    TENSORS = "tensors"  # the tensor table is not consistent with itself or the payload
    NAMESPACE = "namespace"  # of another model, scheme or format of cache
    KEY = "key"  # another block than asked for
    KIND = "kind"  # likewise
    TOKENS = "tokens"  # the key is right, and yet the tokens are others

    @property
    def is_damage(self) -> bool:
        """Is the block of no use to anybody? One that only we cannot read is left alone."""
        return self not in (Reason.NO_SECRET, Reason.VERSION)


class CacheStoreError(Exception):
    """Base of everything that the cache store raises on purpose."""


class BlockRejected(CacheStoreError):
    """These bytes are not the block asked for; ``reason`` says how that showed."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class TierError(CacheStoreError):
    """A tier did not do what it was asked, for a reason outside of this process."""


class TierAway(TierError):
    """What a tier lies in is not there now."""


class TierMisconfigured(TierError):
    """A tier cannot be used as it is set up; the message says what to change."""
