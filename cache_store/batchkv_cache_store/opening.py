"""Makes a store of settings: reads tiers, secret and salt, and refuses the queue's own database.

=============================  ====================================================================
``BATCHKV_CACHE``              the tiers (``tiers.specs``); if they have passwords, better in the
                               file that ``BATCHKV_CACHE_FILE`` names
``BATCHKV_CACHE_SECRET_FILE``  a file with the secret that signs blocks, 16 bytes or more; or
                               ``BATCHKV_CACHE_SECRET``
``BATCHKV_CACHE_SALT_FILE``    a file with the tenant's salt (``keys``); or ``BATCHKV_CACHE_SALT``
=============================  ====================================================================

Secret and salt are never flags, because all users of a machine can see its command lines. Other
users must not have access to their files. A fault in a setting raises ValueError with one sentence.
A tier that cannot be used raises TierMisconfigured.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from batchkv_cache_store.blocks.seal import MIN_SECRET_BYTES
from batchkv_cache_store.errors import TierError
from batchkv_cache_store.load_or_compute import Gate
from batchkv_cache_store.store import Store, StoreSettings
from batchkv_cache_store.tiers.base import Tier
from batchkv_cache_store.tiers.spec_types import RedisSpec, TierSpec
from batchkv_cache_store.tiers.specs import parse_tiers

__all__ = [
    "TierSpec", "lease_url", "open_store", "open_tiers", "parse_tiers", "queue_conflict",
    "read_cache", "read_salt", "read_secret",
]  # fmt: skip

CACHE_VARIABLE = "BATCHKV_CACHE"
SECRET_VARIABLE = "BATCHKV_CACHE_SECRET"
SALT_VARIABLE = "BATCHKV_CACHE_SALT"
_MAX_FILE_BYTES = 64 * 1024
_REDIS_PORT = 6379
_THIS_MACHINE = {"localhost", "127.0.0.1", "::1", None}


def open_tiers(specs: Iterable[TierSpec], *, as_guest: bool = False) -> list[Tier]:
    """Open the tiers without a call to any server. Raises TierMisconfigured.

    ``as_guest``: for commands that read a cache; such tiers make and evict nothing.
    """
    tiers: list[Tier] = []
    try:
        for spec in specs:
            tiers.append(spec.open(as_guest=as_guest))
    except TierError:
        for tier in tiers:
            tier.close()
        raise
    return tiers


def open_store(
    text: str,
    *,
    secret: bytes | None = None,
    gate: Gate | None = None,
    settings: StoreSettings | None = None,
) -> Store:
    """Make the store that ``text`` describes; ``Store.close`` closes its tiers.

    Raises ValueError for the text or the secret, TierMisconfigured for a tier.
    """
    specs = parse_tiers(text)
    check_secret(secret)
    return Store(open_tiers(specs), secret, gate, settings)


def check_secret(secret: bytes | None) -> None:
    """Raise ValueError if the secret is too short to sign with."""
    if secret is not None and len(secret) < MIN_SECRET_BYTES:
        raise ValueError(f"the cache's secret has fewer than {MIN_SECRET_BYTES} bytes")


def lease_url(specs: Iterable[TierSpec]) -> str | None:
    """URL, with its password, of the Redis server that keeps leases; None without one."""
    return next((spec.url for spec in specs if isinstance(spec, RedisSpec)), None)


def queue_conflict(specs: Sequence[TierSpec], queue_url: str) -> str | None:
    """A sentence if a tier is the queue's own database, else None.

    A cache that evicts would evict jobs. This compares addresses and calls no server.
    ``RedisTier.check`` finds a queue under another address.
    """
    queue = _database(queue_url)
    for spec in specs:
        if isinstance(spec, RedisSpec) and queue is not None and _database(spec.url) == queue:
            return (
                f"the cache at {spec} is the queue's own Redis database, where a full cache would "
                "evict jobs: give it a server of its own, or at least another database"
            )
    return None


def _database(url: str) -> tuple[str, int, int] | None:
    """(host or socket, port, database); None for a URL that cannot be parsed."""
    try:
        split = urlsplit(url)
        said = parse_qs(split.query).get("db", [""])[0] or unquote(split.path).strip("/")
        if split.scheme == "unix":
            said = parse_qs(split.query).get("db", ["0"])[0]
            return os.path.realpath(unquote(split.path)), 0, int(said)
        host = "localhost" if split.hostname in _THIS_MACHINE else str(split.hostname)
        return host, split.port or _REDIS_PORT, int(said or 0)
    except ValueError:
        return None


def read_cache(environ: Mapping[str, str]) -> str | None:
    """The text that describes the tiers; None if it is not set. Raises ValueError."""
    content = _read(environ, CACHE_VARIABLE, is_private=False)
    try:
        return None if content is None else content.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{CACHE_VARIABLE}_FILE names a file that is not text") from None


def read_secret(environ: Mapping[str, str]) -> bytes | None:
    """The secret that signs blocks; None if it is not set. Raises ValueError."""
    secret = _read(environ, SECRET_VARIABLE, is_private=True)
    check_secret(secret)
    return secret


def read_salt(environ: Mapping[str, str]) -> bytes:
    """The tenant's salt; empty if it is not set. Raises ValueError."""
    return _read(environ, SALT_VARIABLE, is_private=True) or b""


def _read(environ: Mapping[str, str], variable: str, *, is_private: bool) -> bytes | None:
    """The variable, or the file that <variable>_FILE names, without blanks at either end."""
    value = os.fsencode(environ.get(variable, "").strip())
    path = environ.get(f"{variable}_FILE", "").strip()
    if value and path:
        raise ValueError(f"{variable} and {variable}_FILE are both set: keep one")
    if not path:
        return value or None
    source = f"{variable}_FILE names {path}"
    try:
        with open(Path(path).expanduser(), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(_MAX_FILE_BYTES + 1).strip()
            # Others may read a file without a password, but they must not write it.
            is_secret = is_private or b"@" in content
            if mode & (0o077 if is_secret else 0o022):
                raise ValueError(f"{source}, which others may open: chmod 600 it")
    except OSError as fault:
        raise ValueError(f"{source}: {fault.strerror or fault}") from fault
    except RuntimeError as fault:
        raise ValueError(f"{source}, but there is no such user") from fault
    if not content or len(content) > _MAX_FILE_BYTES:
        raise ValueError(f"{source}, which is empty or too large")
    return content
