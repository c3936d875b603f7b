"""A tier that never raises: its troubles are counted, and a breaker keeps them from the store."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from batchkv_cache_store.blocks.seal import Buffer
from batchkv_cache_store.breaker import Breaker
from batchkv_cache_store.errors import TierError
from batchkv_cache_store.load_or_compute import Gate
from batchkv_cache_store.tiers.base import Put, Tier, TierStats

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Counters:
    """Numbers by name, safe to share by threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        """Count."""
        with self._lock:
            self._values[name] += amount

    def snapshot(self) -> dict[str, int]:
        """All counters that ever counted, by name."""
        with self._lock:
            return dict(sorted(self._values.items()))


class GuardedTier:
    """One tier as the store uses it. Counters, with the tier's name T:

    ``error.T`` calls that failed, ``skipped.T`` calls not made because the breaker was open,
    ``stored.T``, ``present.T``, ``full.T`` how puts ended.
    """

    def __init__(self, tier: Tier, breaker: Breaker, gate: Gate, counters: Counters) -> None:
        self.name = tier.name
        self.tier = tier
        self.breaker = breaker
        self._gate = gate
        self._counters = counters

    def contains_many(self, names: Sequence[str]) -> dict[str, int]:
        """Sizes of the names that are here; none of them when the tier is in trouble."""
        if not names:
            return {}
        start = time.perf_counter()
        found = self._ask(lambda: self.tier.contains_many(names))
        if found is None:
            return {}
        self._gate.observe_round_trip(self.name, time.perf_counter() - start)
        return found

    def get_many(self, sizes: Mapping[str, int]) -> dict[str, Buffer]:
        """Bytes of the names that are here, not more than each was said to have, but for one byte.

        None of them when the tier is in trouble.
        """
        if not sizes:
            return {}
        return self._ask(lambda: self.tier.get_many(list(sizes), sizes)) or {}

    def put(self, name: str, buffers: Sequence[Buffer]) -> Put | None:
        """How the put ended; None when the tier is in trouble."""
        outcome = self._ask(lambda: self.tier.put(name, buffers))
        if outcome is not None:
            self._counters.add(f"{outcome}.{self.name}")
        return outcome

    def set_aside(self, name: str) -> None:
        """Take a damaged block out of use, if the tier can."""
        self._ask(lambda: self.tier.set_aside(name))

    def stats(self) -> TierStats | None:
        """What the tier holds; None when it is in trouble."""
        return self._ask(self.tier.stats)

    def _ask(self, call: Callable[[], _T]) -> _T | None:
        if not self.breaker.may_ask():
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
            # A bug or an interruption says nothing of the tier; it must not stay half open.
            self.breaker.failed()
            raise
        self.breaker.succeeded()
        if is_back:
            _log.warning("cache tier %s is back", self.name)
        return answer
