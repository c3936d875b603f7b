"""Opens the shared store that a worker's settings name, before any model is loaded."""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchkv_cache_store.errors import TierError, TierMisconfigured
from batchkv_cache_store.lease import Leases, LocalLeases, RedisLeases
from batchkv_cache_store.opening import lease_url, open_tiers, parse_tiers
from batchkv_cache_store.store import Store
from batchkv_worker.errors import SettingsError
from batchkv_worker.prefix.shared.worth import SHARED

if TYPE_CHECKING:
    from batchkv_worker.settings import WorkerSettings

log = logging.getLogger("batchkv.cache")


@dataclass(frozen=True, slots=True)
class Access:
    """An open store and how to use it. ``writer`` is a name in blocks, for people to read.

    ``is_shared``: other processes take leases, too. ``lookup_seconds``: how long a row waits for
    one lookup. ``held_seconds``: how long it waits for another worker that publishes no block
    meanwhile. ``close_seconds``: how long a worker that ends still writes. ``writes``: "needed",
    "shared" or "all", see ``worth``.
    """

    store: Store
    leases: Leases
    is_shared: bool = False
    salt: bytes = b""
    writer: str = ""
    adopts_float: bool = False
    writes: str = SHARED
    lookup_seconds: float = 30.0
    held_seconds: float = 60.0
    close_seconds: float = 3.0  # the engine's thread is waited for no longer than five
    outlives_engine: bool = False

    def close(self) -> None:
        """Write what waits, for a limited time, and close the store and the leases."""
        try:
            self.store.close(self.close_seconds)
        finally:
            self.leases.close()  # not before the blocks are written


def open_access(settings: WorkerSettings) -> Access | None:
    """The store of the settings; None when they name no tier.

    Raises SettingsError for a tier that can never be used as it is set up. One that only does not
    answer now is left to the store, which asks it again from time to time.
    """
    if not settings.cache:
        return None
    specs = parse_tiers(settings.cache)
    try:
        tiers = open_tiers(specs)
        for tier in tiers:
            try:
                tier.check()
            except TierMisconfigured:
                raise
            except TierError as fault:
                log.warning("cache tier %s is away, and asked again later: %s", tier.name, fault)
    except TierMisconfigured as fault:
        raise SettingsError(f"the cache cannot be used: {fault}") from fault
    url = lease_url(specs)
    leases: Leases = LocalLeases()
    if url is not None:
        leases = RedisLeases(url, ttl_seconds=settings.cache_lease_seconds)
    log.info(
        "cache: %s; %s, %s",
        ", ".join(map(str, specs)),
        "signed" if settings.cache_secret else "not signed",
        "leases in its Redis" if url else "no leases between workers, which take a Redis tier",
    )
    return Access(
        Store(tiers, secret=settings.cache_secret),
        leases,
        is_shared=url is not None,
        salt=settings.cache_salt,
        writer=socket.gethostname()[:100],
        adopts_float=settings.kv_adopt_float,
        writes=settings.cache_write,
    )
