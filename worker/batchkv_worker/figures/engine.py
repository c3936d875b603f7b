"""The figures of an engine: how long its rows took, what it repeated, what it holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from batchkv_producer.wire.figures.worker import Times
from batchkv_worker.figures.histogram import FIRST_TOKEN_BOUNDS, ROW_BOUNDS, Histogram, joined
from batchkv_worker.sequence import Sequence

BATCH, LIVE = "batch", "live"  # lanes
COMPUTED_PROMPT, COMPUTED_ANSWER = "computed.prompt", "computed.answer"  # counts, in tokens
IN_DECODE, IN_PREFILL, IN_WAITING = "rows.decode", "rows.prefill", "rows.waiting"  # levels


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """``counts`` and ``times`` only grow. ``levels`` are of a moment of the last second.

    ``cache``: the counters of the shared store, which may outlive an engine.
    """

    counts: Mapping[str, float] = field(default_factory=dict)
    levels: Mapping[str, float] = field(default_factory=dict)
    times: Mapping[str, Times] = field(default_factory=dict)
    cache: Mapping[str, int] = field(default_factory=dict)

    def after(self, earlier: EngineFigures) -> EngineFigures:
        """These figures of an engine, counted on from those of the engine before it."""
        counts = dict(earlier.counts)
        for key, count in self.counts.items():
            counts[key] = counts.get(key, 0) + count
        times = dict(earlier.times)
        for key, one in self.times.items():
            times[key] = joined(times[key], one) if key in times else one
        return EngineFigures(counts, self.levels, times, self.cache)


@dataclass(frozen=True, slots=True)
class Progress:
    """The rows that an engine has now, and the tokens that it has computed. Quickly read."""

    num_waiting: int = 0
    num_prefill: int = 0
    num_decode: int = 0
    num_prompt: int = 0
    num_generated: int = 0


class RowTimes:
    """How long rows took in an engine, by lane. Replays and further choices are left out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._firsts = {lane: Histogram(FIRST_TOKEN_BOUNDS) for lane in (BATCH, LIVE)}
        self._rows = {lane: Histogram(ROW_BOUNDS) for lane in (BATCH, LIVE)}

    def note_first_token(self, row: Sequence) -> None:
        """The first token of a row was read."""
        if row.choice == 0 and row.replay_of is None:
            self._firsts[LIVE if row.is_live else BATCH].add(self._clock() - row.came_at)

    def note_end(self, row: Sequence) -> None:
        """A row has ended well, with all its choices."""
        self._rows[LIVE if row.is_live else BATCH].add(self._clock() - row.came_at)

    @property
    def times(self) -> dict[str, Times]:
        """Both histograms of each lane."""
        firsts = {f"first_token.{lane}": one.times for lane, one in self._firsts.items()}
        return firsts | {f"row.{lane}": one.times for lane, one in self._rows.items()}
