"""Load a cached prefix, or compute it again? Whichever measured speeds say is sooner done.

A chain of blocks can be taken up to any of several depths. Each depth saves the time of computing
its tokens and costs one round trip to each tier concerned plus the time of its bytes; the depth
that saves most is taken, and none when none saves anything. All speeds are measured while working
(moving averages of seconds a byte and seconds a token, which, unlike averages of speeds, are not
carried away by one lucky sample). What was never measured counts as free: so it is tried, and
measured (the search tries one block of it before it goes on). A depth that is refused is tried all
the same now and then, the smallest step of it, since a network that was slow may not be any more;
what that may cost is a share of the time that the refused prompts took to compute.

Pure: no clock, no I/O. Everything is counted in bytes, tokens and seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_LEAST_SHARE = 0.1  # of a load's time that is surely not the round trip


@dataclass(frozen=True, slots=True)
class Option:
    """One depth: the tokens it saves, and the bytes it takes from each tier (by name)."""

    num_tokens: int
    bytes_by_tier: Mapping[str, int]


@dataclass(slots=True)
class _Average:
    """A moving average; None before the first sample."""

    weight: float
    value: float | None = None

    def add(self, sample: float) -> None:
        old = self.value
        self.value = sample if old is None else old + self.weight * (sample - old)


class Gate:
    """The measured speeds, and the choice. Safe to share by threads.

    ``weight`` is that of a new sample. Trying what was refused may lose ``probe_share`` of the
    time that is spent on computing what was refused.
    """

    def __init__(self, weight: float = 0.2, probe_share: float = 0.01) -> None:
        self._weight = weight
        self._probe_share = probe_share
        self._lock = threading.Lock()
        self._round_trips: dict[str, _Average] = {}
        self._seconds_per_byte: dict[str, _Average] = {}
        self._seconds_per_token = _Average(weight)
        self._credit_seconds = 0.0  # that a try may lose

    def observe_round_trip(self, tier: str, seconds: float) -> None:
        """A request that moved next to nothing took that long."""
        with self._lock:
            self._round_trips.setdefault(tier, _Average(self._weight)).add(seconds)

    def observe_load(self, tier: str, num_bytes: int, seconds: float) -> None:
        """Loading that many bytes in one request took that long."""
        if num_bytes <= 0:
            return
        with self._lock:
            known = self._round_trips.get(tier)
            round_trip = known.value if known is not None and known.value is not None else 0.0
            moving = max(seconds - round_trip, _LEAST_SHARE * seconds)
            average = self._seconds_per_byte.setdefault(tier, _Average(self._weight))
            average.add(moving / num_bytes)

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Computing that many prompt tokens took that long."""
        if num_tokens > 0:
            with self._lock:
                self._seconds_per_token.add(seconds / num_tokens)

    def load_seconds(self, tier: str, num_bytes: int) -> float:
        """How long a load is expected to take; what was never measured counts as nothing."""
        round_trip, per_byte = self._round_trips.get(tier), self._seconds_per_byte.get(tier)
        fixed = round_trip.value if round_trip is not None else None
        rate = per_byte.value if per_byte is not None else None
        return (fixed or 0.0) + num_bytes * (rate or 0.0)

    def is_measured(self, tier: str) -> bool:
        """Whether a load from this tier was ever timed."""
        return tier in self._seconds_per_byte

    def choose(self, options: Sequence[Option], *, is_first: bool = True) -> int | None:
        """Index of the option to load, None to compute everything. Options: shallow to deep.

        Only the first choice for a prompt counts as a refusal; later ones follow what was loaded.
        """
        if not options:
            return None
        deepest = len(options) - 1
        with self._lock:
            per_token = self._seconds_per_token.value
            if per_token is None:
                return deepest
            saved = [
                option.num_tokens * per_token
                - sum(self.load_seconds(tier, size) for tier, size in option.bytes_by_tier.items())
                for option in options
            ]
            best = max(range(len(options)), key=lambda index: (saved[index], index))
            chosen = best if saved[best] > 0 else -1
            if chosen != deepest and is_first:
                refused = options[deepest].num_tokens - (
                    options[chosen].num_tokens if chosen >= 0 else 0
                )
                self._credit_seconds += self._probe_share * refused * per_token
                loss = (saved[chosen] if chosen >= 0 else 0.0) - saved[chosen + 1]
                if loss <= self._credit_seconds:
                    self._credit_seconds -= loss
                    return chosen + 1
        return None if chosen < 0 else chosen
