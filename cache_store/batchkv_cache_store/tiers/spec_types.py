"""The settings of tiers as frozen values. ``open`` makes the tier of a value.

``specs`` parses them from a text; ``opening`` makes a store of them. No ``repr`` or ``str`` shows a
password.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from batchkv_cache_store.tiers.base import Tier
from batchkv_cache_store.tiers.disk import DiskTier, Durability
from batchkv_cache_store.tiers.memory import MemoryTier
from batchkv_cache_store.tiers.redis import RedisTier

MEMORY_BYTES = 2 * 10**9
DISK_BYTES = 20 * 10**9
OBJECTS_BYTES = 100 * 10**9
OBJECTS_PREFIX = "batchkv/"


class TierSpec(ABC):
    """One tier as the user wrote it; ``str`` is its address without the password.

    ``kind``: the ``name`` of the tier that ``open`` makes. ``max_bytes`` None: the server's cap.
    """

    __slots__ = ()

    kind: ClassVar[str]
    max_bytes: int | None

    @abstractmethod
    def open(self, *, as_guest: bool = False) -> Tier:
        """Make the tier, without a call to a server. Raises TierMisconfigured.

        ``as_guest``: for commands that read a cache; it makes and evicts nothing (``DiskTier``).
        """

    @abstractmethod
    def __str__(self) -> str: ...


@dataclass(frozen=True, slots=True)
class MemorySpec(TierSpec):
    """Memory of this process."""

    kind = "memory"
    max_bytes: int = MEMORY_BYTES

    def open(self, *, as_guest: bool = False) -> MemoryTier:
        return MemoryTier(self.max_bytes)

    def __str__(self) -> str:
        return "memory:"


@dataclass(frozen=True, slots=True)
class DiskSpec(TierSpec):
    """A folder; ``path`` is absolute."""

    kind = "disk"
    path: Path
    max_bytes: int = DISK_BYTES
    durability: Durability = Durability.NONE

    def open(self, *, as_guest: bool = False) -> DiskTier:
        return DiskTier(self.path, self.max_bytes, self.durability, is_guest=as_guest)

    def __str__(self) -> str:
        return f"disk:{self.path}"


@dataclass(frozen=True, slots=True)
class RedisSpec(TierSpec):
    """A database of a Redis server. ``url``: for redis-py; ``place``: it without credentials."""

    kind = "redis"
    url: str = field(repr=False)
    place: str
    max_bytes: int | None = None

    def open(self, *, as_guest: bool = False) -> RedisTier:
        return RedisTier(self.url, self.max_bytes)

    def __str__(self) -> str:
        return self.place


@dataclass(frozen=True, slots=True)
class ObjectsSpec(TierSpec):
    """A bucket; ``prefix`` ends with a slash. Credentials come from where AWS tools look."""

    kind = "objects"
    bucket: str
    prefix: str = OBJECTS_PREFIX
    max_bytes: int = OBJECTS_BYTES
    endpoint_url: str | None = None
    region: str | None = None

    def open(self, *, as_guest: bool = False) -> Tier:
        # Imported here, because boto3 is an extra and slow to import.
        from batchkv_cache_store.tiers.objects import ObjectsTier

        settings = {"region_name": self.region} if self.region else {}
        return ObjectsTier(self.bucket, self.max_bytes, self.endpoint_url, self.prefix, **settings)

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"
