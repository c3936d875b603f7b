"""Who sends a request, and what it may do."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from batchkv_gateway.keys.store import LOCAL, ApiKey

_SALT_DIGITS = 32


@dataclass(frozen=True, slots=True)
class Defaults:
    """What holds for keys that do not say it themselves. A limit of 0 is none."""

    max_rows: int = 0
    max_bytes: int = 0
    is_private: bool = False


NO_DEFAULTS = Defaults()


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request. ``owner`` owns what the request makes.

    ``sees_all``: it may see and manage the batches of all owners, and the workers.
    ``cache_salt``: its rows share prefixes with rows of this salt alone; None: with all that have
    none. ``max_rows`` may be open at once, and files of ``max_bytes`` be kept; 0 is no limit.
    """

    owner: str = LOCAL
    sees_all: bool = False
    reads_metrics: bool = False
    cache_salt: str | None = None
    max_rows: int = 0
    max_bytes: int = 0


def caller_of(key: ApiKey | None, defaults: Defaults = NO_DEFAULTS) -> Caller:
    """The caller with this key. None: a request of this machine while there is no key."""
    if key is None:
        salt = salt_of(LOCAL) if defaults.is_private else None
        return Caller(sees_all=True, reads_metrics=True, cache_salt=salt)
    is_private = key.is_private or defaults.is_private
    return Caller(
        owner=key.key_id,
        sees_all=key.is_admin,
        reads_metrics=key.is_admin or key.reads_metrics,
        cache_salt=salt_of(key.key_id) if is_private else None,
        max_rows=key.max_rows or (0 if key.is_admin else defaults.max_rows),
        max_bytes=key.max_bytes or (0 if key.is_admin else defaults.max_bytes),
    )


def salt_of(owner: str) -> str:
    """The salt of a private owner's rows. Clients cannot choose one, so it need not be secret."""
    return hashlib.sha256(f"batchkv cache salt {owner}".encode()).hexdigest()[:_SALT_DIGITS]
