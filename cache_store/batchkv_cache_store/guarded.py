"""A tier that never raises: failures are counted, and a breaker pauses a failing tier."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import TypeVar

from batchkv_cache_store.blocks.seal import Buffer
from batchkv_cache_store.breaker import Breaker
from batchkv_cache_store.errors import TierError
from batchkv_cache_store.load_or_compute import Gate
from batchkv_cache_store.tiers.base import Put, Tier, TierStats

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_END: tuple[()] = ()


class Counters:
    """Numbers by name. Threads may share them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        """Add to a counter."""
        with self._lock:
            self._values[name] += amount

    def snapshot(self) -> dict[str, int]:
        """All counters that were ever used, by name."""
        with self._lock:
            return dict(sorted(self._values.items()))


class GuardedTier:
    """One tier as the store uses it. Its counters, where T is the tier's name:

    ``error.T``: calls that failed. ``skipped.T``: calls not made because the breaker was open.
    ``stored.T``, ``present.T``, ``full.T``: puts by their result (``Put``). ``read_bytes.T`` and
    ``stored_bytes.T``: bytes of the objects that were read and stored.
    """

    def __init__(self, tier: Tier, breaker: Breaker, gate: Gate, counters: Counters) -> None:
        self.name = tier.name
        self.tier = tier
        self.breaker = breaker
        self._gate = gate
        self._counters = counters

    def contains_many(self, names: Sequence[str]) -> dict[str, int]:
        """Sizes of the names that the tier holds; empty if the tier fails."""
        if not names:
            return {}
        start = time.perf_counter()
        found = self._call(lambda: self.tier.contains_many(names))
        if found is None:
            return {}
        self._gate.observe_round_trip(self.name, time.perf_counter() - start)
        return found

    def get_many(self, sizes: Mapping[str, int]) -> dict[str, Buffer]:
        """Bytes of the names that the tier holds; empty if the tier fails.

        At most one byte more than ``sizes`` says is read of each name.
        """
        if not sizes:
            return {}
        found = self._call(lambda: self.tier.get_many(list(sizes), sizes)) or {}
        self._counters.add(f"read_bytes.{self.name}", _num_bytes(found.values()))
        return found

    def stream(self, sizes: Mapping[str, int]) -> Generator[tuple[str, Buffer], None, None]:
        """``get_many``, one object after the other as they arrive; ends early if the tier fails."""
        objects = self.tier.stream(list(sizes), sizes)
        try:
            while one := self._call(lambda: next(objects, _END)):
                self._counters.add(f"read_bytes.{self.name}", len(one[1]))
                yield one
        finally:
            objects.close()

    def put(self, name: str, buffers: Sequence[Buffer], *, is_timed: bool = False) -> Put | None:
        """Store the buffers. Returns the result; None if the tier fails.

        ``is_timed``: they are a block, whose time tells how quick the tier is.
        """
        start = time.perf_counter()
        outcome = self._call(lambda: self.tier.put(name, buffers))
        if outcome is not None:
            self._counters.add(f"{outcome}.{self.name}")
            if outcome is Put.STORED:
                num_bytes = _num_bytes(buffers)
                if is_timed:
                    self._gate.observe_write(self.name, num_bytes, time.perf_counter() - start)
                self._counters.add(f"stored_bytes.{self.name}", num_bytes)
        return outcome

    def set_aside(self, name: str) -> None:
        """Take a damaged block out of use, unless the tier fails."""
        self._call(lambda: self.tier.set_aside(name))

    def stats(self) -> TierStats | None:
        """The tier's contents; None if it fails."""
        return self._call(self.tier.stats)

    def _call(self, call: Callable[[], _T]) -> _T | None:
        if not self.breaker.may_call():
            self._counters.add(f"skipped.{self.name}")
            return None
        is_back = not self.breaker.is_closed
        try:
            answer = call()
        except TierError as fault:
            self._counters.add(f"error.{self.name}")
            self.breaker.failed()
            _log.warning("cache tier %s: %s", self.name, fault)
            return None
        except BaseException:
            # A bug or an interrupt is no fault of the tier, but must not leave it half open.
            self.breaker.failed()
            raise
        self.breaker.succeeded()
        if is_back:
            _log.warning("cache tier %s is back", self.name)
        return answer


def _num_bytes(buffers: Iterable[Buffer]) -> int:
    return sum(memoryview(one).nbytes for one in buffers)
