"""Decides whether to load a cached prefix or to compute it again, by measured speeds.

A chain of blocks can be loaded up to any of several depths. A depth saves the time to compute its
tokens. It costs one round trip to each of its tiers and the time to load its bytes. The depth that
saves most is chosen, or none if none saves time. A load must be clearly quicker: it also costs
copies, checks and room in memory, and speeds vary. So it may take ``CLEAR_SHARE`` of the time that
computing takes.

All speeds are measured in use, as moving averages of seconds per byte and seconds per token. Unlike
averages of speeds, these are not distorted by one lucky sample. The short rest of a prompt takes
long for its few tokens, most of all where a long prefix is put before it. So it counts only until
a longer part of a prompt was timed. A speed that was never measured counts as free, so that it is
tried and measured (the search first loads one block). A network that was slow may be fast again. So
the smallest step of a refused depth is tried now and then. Such tries may cost a fixed share of the
time that the refused prompts took to compute.

Pure functions: no clock, no I/O. Units are bytes, tokens and seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CLEAR_SHARE = 0.8  # of the time to compute that a load may take, to be worth it
_LEAST_LOSS = 0.25  # of a load's time that a try counts as lost, however quick it is expected to be
_LEAST_TOKENS = 256  # computed at once that tell the speed, if so many ever were
_LEAST_SHARE = 0.1  # of a load's time that counts as transfer, whatever the round trip takes


@dataclass(frozen=True, slots=True)
class Option:
    """One depth: the tokens that it saves, and the bytes to load from each tier (by name)."""

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
    """Measures speeds and chooses how much of a prefix to load. Threads may share a gate.

    ``weight``: of a new sample in a moving average. ``probe_share``: tries of refused depths may
    lose this share of the time that computing the refused tokens takes.
    """

    def __init__(self, weight: float = 0.2, probe_share: float = 0.01) -> None:
        self._weight = weight
        self._probe_share = probe_share
        self._lock = threading.Lock()
        self._round_trips: dict[str, _Average] = {}
        self._seconds_per_byte: dict[str, _Average] = {}
        self._write_seconds_per_byte: dict[str, _Average] = {}
        self._seconds_per_token = _Average(weight)
        self._most_tokens = 0  # computed at once
        self._credit_seconds = 0.0  # time that tries may lose

    def observe_round_trip(self, tier: str, seconds: float) -> None:
        """Record the time of a request that moved almost no bytes."""
        with self._lock:
            self._round_trips.setdefault(tier, _Average(self._weight)).add(seconds)

    def observe_load(self, tier: str, num_bytes: int, seconds: float) -> None:
        """Record the time of one request that loaded so many bytes."""
        if num_bytes <= 0:
            return
        with self._lock:
            known = self._round_trips.get(tier)
            round_trip = known.value if known is not None and known.value is not None else 0.0
            moving = max(seconds - round_trip, _LEAST_SHARE * seconds)
            average = self._seconds_per_byte.setdefault(tier, _Average(self._weight))
            average.add(moving / num_bytes)

    def observe_write(self, tier: str, num_bytes: int, seconds: float) -> None:
        """Record the time of a put of so many bytes, which takes two round trips."""
        if num_bytes <= 0:
            return
        with self._lock:
            known = self._round_trips.get(tier)
            round_trip = known.value if known is not None and known.value is not None else 0.0
            moving = max(seconds - 2 * round_trip, _LEAST_SHARE * seconds)
            average = self._write_seconds_per_byte.setdefault(tier, _Average(self._weight))
            average.add(moving / num_bytes)

    def pays(
        self, tier: str, num_tokens: int, num_bytes: int, slowdown: float = 1.0
    ) -> bool | None:
        """Whether loading so many bytes is clearly quicker than computing so many tokens.

        ``slowdown``: how many times slower than here they are computed. A tier that was never
        loaded from is judged by the time of its writes. None while one of the speeds is unknown.
        The round trip is left out, because many blocks share it.
        """
        with self._lock:
            per_token = self._seconds_per_token.value
            average = self._seconds_per_byte.get(tier) or self._write_seconds_per_byte.get(tier)
            if per_token is None or average is None or average.value is None:
                return None
            return num_bytes * average.value < CLEAR_SHARE * num_tokens * per_token * slowdown

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Record the time to compute so many prompt tokens at once."""
        if num_tokens <= 0:
            return
        with self._lock:
            if num_tokens < _LEAST_TOKENS <= self._most_tokens:
                return
            if self._most_tokens < _LEAST_TOKENS <= num_tokens:
                self._seconds_per_token.value = None  # the short ones before tell less
            self._most_tokens = max(self._most_tokens, num_tokens)
            self._seconds_per_token.add(seconds / num_tokens)

    def prefill_seconds(self, num_tokens: int) -> float | None:
        """The expected time to compute so many prompt tokens; None before any was measured."""
        per_token = self._seconds_per_token.value
        return None if per_token is None else num_tokens * per_token

    def load_seconds(self, tier: str, num_bytes: int) -> float:
        """The expected time of a load; what was never measured counts as 0."""
        round_trip, per_byte = self._round_trips.get(tier), self._seconds_per_byte.get(tier)
        fixed = round_trip.value if round_trip is not None else None
        rate = per_byte.value if per_byte is not None else None
        return (fixed or 0.0) + num_bytes * (rate or 0.0)

    def is_measured(self, tier: str) -> bool:
        """Whether a load from this tier has been timed."""
        return tier in self._seconds_per_byte

    def choose(self, options: Sequence[Option], *, is_first: bool = True) -> int | None:
        """Index of the option to load; None: compute everything. Options are shallow to deep.

        ``is_first``: the first choice for a prompt. Only this one counts as a refusal, because
        later choices for the prompt repeat it.
        """
        if not options:
            return None
        deepest = len(options) - 1
        with self._lock:
            per_token = self._seconds_per_token.value
            if per_token is None:
                return deepest
            loads = [
                sum(self.load_seconds(tier, size) for tier, size in option.bytes_by_tier.items())
                for option in options
            ]
            computed = [option.num_tokens * per_token for option in options]
            saved = [
                CLEAR_SHARE * compute - load for compute, load in zip(computed, loads, strict=True)
            ]
            best = max(range(len(options)), key=lambda index: (saved[index], index))
            chosen = best if saved[best] > 0 else -1
            if chosen != deepest and is_first:
                had, spent = (computed[chosen], loads[chosen]) if chosen >= 0 else (0.0, 0.0)
                self._credit_seconds += self._probe_share * (computed[deepest] - had)
                load = loads[chosen + 1] - spent
                loss = max(load - (computed[chosen + 1] - had), _LEAST_LOSS * load)
                if loss <= self._credit_seconds:
                    self._credit_seconds -= loss
                    return chosen + 1
        return None if chosen < 0 else chosen
