"""The engine's interface to the store that workers share; ``NoSharedPrefixes`` is for no store.

All methods are called on the engine's thread. Only ``wait`` and ``close`` wait. For a row, the
engine calls ``begin`` when it comes in, ``is_ready`` before its prompt is computed, ``note`` when
it ends, and ``forget`` once its prompt is computed or it is cancelled. It calls ``advance`` at each
step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from batchkv_producer.wire.cache_note import CacheNote
from batchkv_worker.prefix.memory import LOCAL_ROOT, OnNew, PrefixCache
from batchkv_worker.sequence import Sequence


class PrefixClient(ABC):
    """One engine's access to the shared store.

    ``root`` is the first key of all its key chains. ``on_new`` is called with parts of blocks that
    were computed. ``is_busy``: the next step has work for the store, even without any row.
    ``counts_shared``: rows must say how many of their tokens another row of the batch begins with.
    """

    root: bytes = LOCAL_ROOT
    on_new: OnNew | None = None
    counts_shared = False

    @abstractmethod
    def attach(self, prefixes: PrefixCache) -> None:
        """Set the memory that blocks are put into; called once, before any other method."""

    @property
    @abstractmethod
    def is_busy(self) -> bool: ...

    @abstractmethod
    def begin(self, row: Sequence) -> None:
        """A row came in; its keys are known."""

    @abstractmethod
    def advance(self, waiting: Iterable[Sequence]) -> None:
        """Take in results of lookups; start lookups for the rows that are next."""

    @abstractmethod
    def is_ready(self, row: Sequence) -> bool:
        """Whether a row's prompt may be computed now; if not, its lookup is under way."""

    @abstractmethod
    def wait(self, timeout_seconds: float) -> None:
        """Wait for the result of a lookup: the engine has nothing else to do."""

    @abstractmethod
    def send(self, *, is_idle: bool, before_waiting: Callable[[], None]) -> None:
        """Send blocks that are computed by now; all when the engine is idle.

        Called after a step, and after each chunk of prompts while no row decodes. It calls
        ``before_waiting`` before it waits for a block.
        """

    @abstractmethod
    def drop_unsent(self) -> None:
        """Drop blocks that were not sent: memory ran out, so their content cannot be trusted."""

    @abstractmethod
    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Record how long so many prompt tokens took to compute."""

    @abstractmethod
    def note(self, row: Sequence) -> CacheNote | None:
        """The note about a row's hits in the store; None for a row without a full block."""

    @abstractmethod
    def forget(self, row: Sequence) -> None:
        """Release what a row holds: it is computed or cancelled. May be called again."""

    @abstractmethod
    def count(self, name: str) -> None:
        """Add one to a counter that is shown with the store's."""

    @property
    def counters(self) -> dict[str, int]:
        """The store's counters, and those of ``count``; empty without a store."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Continue started writes for a moment, then release everything."""


class NoSharedPrefixes(PrefixClient):
    """No store: every row is ready at once, and no block leaves this worker."""

    def attach(self, prefixes: PrefixCache) -> None:
        """Nothing comes into it from elsewhere."""

    @property
    def is_busy(self) -> bool:
        return False

    def begin(self, row: Sequence) -> None:
        """Nothing to look up."""

    def advance(self, waiting: Iterable[Sequence]) -> None:
        """Nothing comes."""

    def is_ready(self, row: Sequence) -> bool:
        return True

    def wait(self, timeout_seconds: float) -> None:
        """Nothing to wait for."""

    def send(self, *, is_idle: bool, before_waiting: Callable[[], None]) -> None:
        """Nothing to hand on."""

    def drop_unsent(self) -> None:
        """Nothing is ever sent."""

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """No loading to compare computing with."""

    def note(self, row: Sequence) -> CacheNote | None:
        return None

    def forget(self, row: Sequence) -> None:
        """It holds nothing."""

    def count(self, name: str) -> None:
        """No counters."""

    def close(self) -> None:
        """Nothing is open."""
