"""What the engine asks of the prefixes that workers share; ``Alone`` is a worker that shares none.

All of it is called on the engine's thread, and only ``wait`` and ``close`` wait. A row's way:
``begin`` when it comes in; ``advance`` at each step, and ``is_ready`` until it is; ``note`` when it
ends; ``forget`` once its prompt is computed or nobody wants it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from batchkv_producer.wire.cache_note import CacheNote
from batchkv_worker.prefix.memory import LOCAL_ROOT, OnNew, PrefixCache
from batchkv_worker.sequence import Sequence


class SharedPrefixes(ABC):
    """One engine's end of the shared store.

    ``root`` starts the key chains of its prompts; ``on_new`` hears of parts of blocks that were
    computed; ``is_busy`` says that something is to be done at the next step though no row is there;
    ``counts_shared`` that rows must say how much of them their batch shares.
    """

    root: bytes = LOCAL_ROOT
    on_new: OnNew | None = None
    counts_shared = False

    @abstractmethod
    def attach(self, prefixes: PrefixCache) -> None:
        """The memory to put blocks into; called once, before anything else."""

    @property
    @abstractmethod
    def is_busy(self) -> bool: ...

    @abstractmethod
    def begin(self, row: Sequence) -> None:
        """A row came in; its keys are known."""

    @abstractmethod
    def advance(self, waiting: Iterable[Sequence]) -> None:
        """Take in what came; look up prefixes of the rows that are next."""

    @abstractmethod
    def is_ready(self, row: Sequence) -> bool:
        """Whether a row's prompt may be computed now; else what it waits for is under way."""

    @abstractmethod
    def wait(self, timeout_seconds: float) -> None:
        """Wait for something to come: there is nothing else to do."""

    @abstractmethod
    def send(self, *, is_idle: bool) -> None:
        """After a step: hand on what is computed by now; all of it when nothing else is to do."""

    @abstractmethod
    def drop_unsent(self) -> None:
        """Hand on nothing of what was computed lately: it cannot be trusted."""

    @abstractmethod
    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Computing that many prompt tokens took that long."""

    @abstractmethod
    def note(self, row: Sequence) -> CacheNote | None:
        """What the store had for a row; None for one that is too short to ask."""

    @abstractmethod
    def forget(self, row: Sequence) -> None:
        """A row's prompt is computed, or nobody wants it any more. Any number of times."""

    @abstractmethod
    def count(self, name: str) -> None:
        """Count something that is shown with the store's counters."""

    @abstractmethod
    def close(self) -> None:
        """Write what is under way for a moment, then let everything go."""


class Alone(SharedPrefixes):
    """No store: every row is ready at once, and nothing leaves this worker."""

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

    def send(self, *, is_idle: bool) -> None:
        """Nothing to hand on."""

    def drop_unsent(self) -> None:
        """Nothing is ever sent."""

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Nobody weighs loading against computing."""

    def note(self, row: Sequence) -> CacheNote | None:
        return None

    def forget(self, row: Sequence) -> None:
        """It holds nothing."""

    def count(self, name: str) -> None:
        """Nobody looks."""

    def close(self) -> None:
        """Nothing is open."""
