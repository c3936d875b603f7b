"""Reads what ``batchkv top`` shows: batches, workers with their figures, and their speeds."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from redis import Redis

from batchkv_producer.batch_facts import all_times_left
from batchkv_producer.client import BatchStatus, Client, WorkerInfo
from batchkv_producer.monitor.workers import workers_with_figures
from batchkv_producer.wire.figures.worker import WorkerFigures

MAX_BATCHES = 50  # the newest
SPEED_SECONDS = 30.0  # speeds are means over this time
COUNT_SECONDS = 60.0  # between two counts of all batches of the server
PRESSURES = {1.0: "normal", 2.0: "warning", 4.0: "critical"}


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker. ``figures`` is None for one of an older version."""

    info: WorkerInfo
    figures: WorkerFigures | None = None

    @property
    def pressure(self) -> str:
        """How short of memory its machine is, in macOS's words; "" if that is not known."""
        return PRESSURES.get(self.level("pressure") or 0.0, "")

    @property
    def is_short_of_memory(self) -> bool:
        """Whether its machine is about to stop programs."""
        return self.pressure == "critical"

    @property
    def cached_share(self) -> float | None:
        """The share of its prompt tokens that were cached, since it started."""
        counts = self.figures.counts if self.figures else {}
        prompt = counts.get("tokens.prompt", 0)
        return counts.get("tokens.cached", 0) / prompt if prompt else None

    def level(self, name: str) -> float | None:
        """A level of its figures; None if it has none of that name."""
        return self.figures.levels.get(name) if self.figures else None


@dataclass(frozen=True, slots=True)
class View:
    """What is shown. ``left`` and ``speeds`` are by batch: seconds until its end, and generated
    tokens a second of late. ``read_at`` is in seconds since 1970, by the server's clock."""

    batches: tuple[BatchStatus, ...]
    workers: tuple[WorkerView, ...]
    left: Mapping[str, float]
    speeds: Mapping[str, float]
    read_at: float
    num_batches: int

    @property
    def tokens_per_second(self) -> int:
        """The sum of all workers that are not away."""
        return sum(w.info.tokens_per_second or 0 for w in self.workers if not w.info.is_away)


class Reader:
    """Reads one view after the other."""

    def __init__(self, client: Client, connection: Redis) -> None:
        self._client = client
        self._connection = connection
        self._seen: dict[str, deque[tuple[float, int]]] = {}
        self._num_batches, self._counted_at = 0, float("-inf")

    def read(self) -> View:
        """The view now. Raises RedisError."""
        found = self._client.workers()
        figures = {info.name: one for info, one in workers_with_figures(self._connection)}
        batches = self._client.list_batches(MAX_BATCHES)
        is_cut = len(batches) == MAX_BATCHES
        seconds, micros = self._connection.time()
        now = seconds + micros / 1e6
        return View(
            batches=tuple(sorted(batches, key=attrgetter("is_done"))),  # open ones first
            workers=tuple(WorkerView(info, figures.get(info.name)) for info in found),
            left=all_times_left(self._client, found),
            speeds=self._speeds(batches, now),
            read_at=now,
            num_batches=self._count(now) if is_cut else len(batches),
        )

    def _count(self, now: float) -> int:
        """The number of all batches, which changes slowly and is read seldom."""
        if now - self._counted_at >= COUNT_SECONDS:
            self._num_batches, self._counted_at = self._client.count_batches(), now
        return self._num_batches

    def _speeds(self, batches: Sequence[BatchStatus], now: float) -> dict[str, float]:
        """Generated tokens a second of the batches under way, once there are two readings."""
        found = {}
        for batch in batches:
            if batch.is_done:
                self._seen.pop(batch.batch_id, None)
                continue
            seen = self._seen.setdefault(batch.batch_id, deque())
            seen.append((now, batch.completion_tokens))
            while len(seen) > 2 and now - seen[1][0] >= SPEED_SECONDS:
                seen.popleft()
            (before, num_before), (after, num_after) = seen[0], seen[-1]
            if after > before:
                found[batch.batch_id] = (num_after - num_before) / (after - before)
        return found
