"""What every tier does, so that the store need not know which one it has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from batchkv_cache_store.blocks.names import checked
from batchkv_cache_store.blocks.seal import Buffer

# Above what any block may have (``header.Limits``), so never a reason to lose one.
MAX_OBJECT_BYTES = 512 * 1024 * 1024


class Put(StrEnum):
    """How a put ended; none of these is an error."""

    STORED = "stored"
    PRESENT = "present"  # somebody was first: theirs stays
    FULL = "full"  # no room, and none could be made


@dataclass(frozen=True, slots=True)
class TierStats:
    """What a tier holds; None where finding out would cost more than it is worth.

    ``num_foreign`` counts objects in the tier's own room that are not ours: they are left alone.
    ``num_aside`` damaged blocks were set aside; ``pinned_bytes`` of ``num_pinned`` blocks are not
    evicted.
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
    """A name that a tier holds. ``last_used``: seconds since 1970, None where nobody knows."""

    name: str
    num_bytes: int
    last_used: float | None = None


@dataclass(frozen=True, slots=True)
class Swept:
    """What is kept besides blocks and was removed: damaged ones, leftovers of dead writers."""

    num_aside: int = 0
    num_stale: int = 0
    num_bytes: int = 0


class Tier(ABC):
    """Bytes by name, put once, kept as long as there is room.

    The contract, which ``tests/cache_store/tiers/test_tiers.py`` holds every tier to:

    - Names are those of ``names``; any other is a ValueError, before anything is touched.
    - ``put`` is put-if-absent and atomic: whoever reads sees all of the bytes or none, whatever
      dies meanwhile. Two that put the same name at once both succeed; one of them stays.
    - Buffers given are read during the call and not kept; buffers returned never change.
    - What is read may be gone by the next call, may be another, and may be damaged: the reader
      checks it, and says how much it takes.
    - The tier never holds more than its ``max_bytes``, also at start and while it writes.
    - Least recently used goes first, where the tier itself evicts. Of the names read together the
      first counts as the latest used, for a chain's tail is worth nothing without its head.
    - ``iter_names`` asks for the next names when they are wanted, so that no listing is held whole.
      What comes or goes meanwhile may be missing or be told twice. Neither it nor ``get_heads``
      counts as a use.
    - Any trouble outside the process is a TierError, within a time that the tier's settings bound.
    - All methods may be called from several threads.
    """

    name: str
    max_bytes: int | None
    is_instant = False  # a put is a copy in memory: it may be done while somebody waits
    can_pin = False

    def check(self) -> None:  # noqa: B027 - most tiers have nothing to look at
        """Look whether the tier can be used at all.

        Raises TierMisconfigured when its settings must change first, TierError when it does not
        answer now. Every other method does this itself once, before its first real work.
        """

    @abstractmethod
    def contains_many(self, names: Sequence[str]) -> dict[str, int]:
        """Sizes in bytes of those names that are here, in one round trip."""

    @abstractmethod
    def get_many(
        self, names: Sequence[str], sizes: Mapping[str, int] | None = None
    ) -> dict[str, Buffer]:
        """The bytes of those names that are here, in one round trip.

        ``sizes``: what ``contains_many`` said of each. One that has more by now is read up to one
        byte more, for its reader to refuse.
        """

    @abstractmethod
    def get_heads(self, names: Sequence[str], num_bytes: int) -> dict[str, Buffer]:
        """The first bytes of those names that are here, in one round trip.

        All bytes of what is shorter. Moves no more than that where the tier can.
        """

    @abstractmethod
    def iter_names(self) -> Iterator[Entry]:
        """Every block and manifest that is here, in any order; foreign objects are left out."""

    @abstractmethod
    def put(self, name: str, buffers: Sequence[Buffer]) -> Put:
        """Keep the buffers, one after the other, unless the name is here already."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Forget the name; it need not be here."""

    def delete_many(self, names: Sequence[str]) -> None:
        """Forget all of these names, in as few round trips as the tier can."""
        for name in [checked(name) for name in names]:
            self.delete(name)

    def set_aside(self, name: str) -> None:
        """Take a damaged block out of use; where it costs nothing it is kept for a look."""
        self.delete(name)

    def pin(self, names: Sequence[str]) -> bool:
        """Let none of the names that are here be evicted, in any process, until ``unpin``.

        False, and nothing is pinned, when all that is pinned would be more than half of the cap.
        ValueError for a tier that cannot pin (``can_pin``).
        """
        raise ValueError(f"the {self.name} tier cannot pin")

    def unpin(self, names: Sequence[str]) -> None:  # noqa: B027 - most tiers cannot pin
        """Let pinned names be evicted again; one that is not pinned is left as it is."""

    def pinned(self) -> list[str]:
        """Names that are pinned, also of blocks that are gone."""
        return []

    def sweep(self, *, is_rehearsal: bool = False) -> Swept:
        """Remove what is kept besides blocks and manifests; a rehearsal only tells."""
        return Swept()

    @abstractmethod
    def stats(self) -> TierStats:
        """What the tier holds now."""

    def close(self) -> None:  # noqa: B027 - most tiers hold nothing open
        """Give back connections and threads. No other method may be called afterwards."""


def bound(sizes: Mapping[str, int] | None, name: str) -> int:
    """How many bytes of that name are read at most; ``sizes`` as for ``Tier.get_many``."""
    return MAX_OBJECT_BYTES if sizes is None else min(sizes[name] + 1, MAX_OBJECT_BYTES)


def size_of(buffers: Sequence[Buffer]) -> int:
    """Bytes of all buffers together."""
    return sum(len(buffer) for buffer in buffers)
