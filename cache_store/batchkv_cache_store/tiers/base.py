"""The contract of all tiers. The store knows only this class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from batchkv_cache_store.blocks.names import checked
from batchkv_cache_store.blocks.seal import Buffer

# Above the limit of a block (``header.Limits``), so no block is lost by it.
MAX_OBJECT_BYTES = 512 * 1024 * 1024
STREAM_BYTES = 64 * 1024 * 1024  # that ``stream`` loads at once by default, and one object more


class Put(StrEnum):
    """The result of a put; none of these is an error."""

    STORED = "stored"
    PRESENT = "present"  # the tier has the name already, and keeps the stored object
    FULL = "full"  # there is no room, and none could be made


@dataclass(frozen=True, slots=True)
class TierStats:
    """The contents of a tier; None where counting would cost too much.

    ``num_foreign``: objects in the tier's folder or bucket that are not batchkv's; they stay.
    ``num_aside``: damaged blocks that were set aside. ``num_pinned``, ``pinned_bytes``: blocks that
    are not evicted.
    """

    num_blocks: int | None
    num_bytes: int | None
    max_bytes: int | None
    num_evicted: int = 0
    num_foreign: int | None = 0
    num_aside: int = 0
    num_pinned: int = 0
    pinned_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Entry:
    """A name that a tier holds. ``last_used``: seconds since 1970; None if unknown."""

    name: str
    num_bytes: int
    last_used: float | None = None


@dataclass(frozen=True, slots=True)
class Swept:
    """The result of a sweep: damaged blocks and files of dead writers that were removed."""

    num_aside: int = 0
    num_stale: int = 0
    num_bytes: int = 0


class Tier(ABC):
    """Stores bytes by name. A name is put once and stays as long as there is room.

    ``tests/cache_store/tiers/test_tiers.py`` tests every tier for this contract:

    - Names are those of ``names``. Any other raises ValueError before anything changes.
    - ``put`` is put-if-absent and atomic: a reader sees all of the bytes or none, even if a writer
      dies. If two callers put one name at once, both succeed, and one object stays.
    - The tier reads given buffers during the call and does not keep them. Returned buffers never
      change.
    - An object may be gone or replaced by the next call, and may be damaged. So the reader checks
      it, and sets the largest size that it reads.
    - The tier never holds more than its ``max_bytes``, also at start and while it writes.
    - A tier that evicts removes the least recently used objects first. Of the names in one read,
      the first counts as the latest used, because a chain's tail is of no use without its head.
    - ``iter_names`` lists in parts, so that no listing is in memory as a whole. Names that are put
      or removed meanwhile may be missing or be listed twice. Neither ``iter_names`` nor
      ``get_heads`` counts as a use.
    - Any fault outside the process is a TierError, within a time that the tier's settings bound.
    - Threads may share a tier.
    """

    name: str
    max_bytes: int | None
    is_instant = False  # a put is a copy in memory, so quick that callers can wait for it
    is_far = False  # blocks cross a network: it is for other workers, not for this one
    can_pin = False

    def check(self) -> None:  # noqa: B027 - most tiers have nothing to check
        """Check that the tier can be used.

        Raises TierMisconfigured if its settings must change first, TierError if it does not answer
        now. Every other method does this itself before its first real work.
        """

    @abstractmethod
    def contains_many(self, names: Sequence[str]) -> dict[str, int]:
        """Sizes in bytes of the names that the tier holds, in one round trip."""

    @abstractmethod
    def get_many(
        self, names: Sequence[str], sizes: Mapping[str, int] | None = None
    ) -> dict[str, Buffer]:
        """The bytes of the names that the tier holds, in one round trip.

        ``sizes``: the sizes that ``contains_many`` returned. At most one byte more is read, so that
        the reader sees that an object has grown, and refuses it.
        """

    def stream(
        self, names: Sequence[str], sizes: Mapping[str, int] | None = None
    ) -> Generator[tuple[str, Buffer], None, None]:
        """``get_many``, but one object after the other in the order of ``names``.

        By default it loads some at once. A tier that can yields each object as it arrives, while
        the next ones are on their way.
        """
        group, num_bytes = list[str](), 0
        for place, name in enumerate(names, start=1):
            group.append(name)
            num_bytes += 0 if sizes is None else sizes[name]
            if num_bytes >= STREAM_BYTES or place == len(names):
                found = self.get_many(group, sizes)
                yield from ((one, found[one]) for one in group if one in found)
                group, num_bytes = [], 0

    @abstractmethod
    def get_heads(self, names: Sequence[str], num_bytes: int) -> dict[str, Buffer]:
        """The first bytes of the names that the tier holds, in one round trip.

        A shorter object is returned whole. If the tier can, it transfers no other bytes.
        """

    @abstractmethod
    def iter_names(self) -> Iterator[Entry]:
        """All blocks and manifests in the tier, in any order, without foreign objects."""

    @abstractmethod
    def put(self, name: str, buffers: Sequence[Buffer]) -> Put:
        """Store the buffers, one after the other, unless the tier has the name already."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete the name, if the tier holds it."""

    def delete_many(self, names: Sequence[str]) -> None:
        """Delete all of these names, in as few round trips as possible."""
        for name in [checked(name) for name in names]:
            self.delete(name)

    def set_aside(self, name: str) -> None:
        """Take a damaged block out of use. A disk tier keeps the file; other tiers delete it."""
        self.delete(name)

    def pin(self, names: Sequence[str]) -> bool:
        """Protect these names, of those in the tier, from eviction by any process until ``unpin``.

        Returns False, and pins nothing, if all pins would be more than half of the cap. Raises
        ValueError for a tier that cannot pin (``can_pin``).
        """
        raise ValueError(f"the {self.name} tier cannot pin")

    def unpin(self, names: Sequence[str]) -> None:  # noqa: B027 - most tiers cannot pin
        """Let pinned names be evicted again; names that are not pinned do not change."""

    def pinned(self) -> list[str]:
        """The pinned names, also of blocks that are gone."""
        return []

    def sweep(self, *, is_dry_run: bool = False) -> Swept:
        """Remove damaged blocks and files of dead writers; a dry run only counts them."""
        return Swept()

    @abstractmethod
    def stats(self) -> TierStats:
        """The tier's contents now."""

    def close(self) -> None:  # noqa: B027 - most tiers hold nothing open
        """Close connections and end threads. No other method may be called afterwards."""


def bound(sizes: Mapping[str, int] | None, name: str) -> int:
    """The most bytes to read of that name; ``sizes`` as for ``Tier.get_many``."""
    return MAX_OBJECT_BYTES if sizes is None else min(sizes[name] + 1, MAX_OBJECT_BYTES)


def size_of(buffers: Sequence[Buffer]) -> int:
    """The sum of the buffers' sizes."""
    return sum(len(buffer) for buffer in buffers)
