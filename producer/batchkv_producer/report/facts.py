"""The types of a report's facts. ``reading.read_facts`` makes them.

Times are in seconds since 1970, durations in seconds or milliseconds as the name says.
``dataclasses.asdict`` makes JSON of each.
"""

from __future__ import annotations

from dataclasses import dataclass

from batchkv_producer.monitor.status import BatchStatus
from batchkv_producer.monitor.workers import COMPARED_SECONDS

COMPUTED = "computed"  # names of ``Source``
MEMORY = "worker's memory"
STORE = "store"  # of results of older workers, which do not name the tier
OTHER_WORKERS = "other workers"
NO_WORKER = "no worker"
LEAST_SECONDS = 1.0  # a row's end is stored in whole seconds


@dataclass(frozen=True, slots=True)
class Bin:
    """A stretch of time. ``seconds`` is the part of it in which the batch ran.

    A row counts when it ended. Its tokens are spread evenly over the time that it ran.
    """

    at: float
    seconds: float
    ok: int
    failed: int
    canceled: int
    prompt_tokens: float
    cached_tokens: float
    completion_tokens: float


@dataclass(frozen=True, slots=True)
class Throughput:
    """The work over time, without gaps: at most 256 bins of one width."""

    width_seconds: int
    bins: tuple[Bin, ...]


@dataclass(frozen=True, slots=True)
class Bar:
    """``count`` values from ``low`` up to, but not including, ``high``."""

    low: int
    high: int
    count: int


@dataclass(frozen=True, slots=True)
class Distribution:
    """Many whole numbers. From 1000 on, percentiles are rounded down to three digits."""

    count: int
    mean: float
    smallest: int
    p50: int
    p90: int
    p99: int
    largest: int
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """Where prompt tokens came from: ``COMPUTED``, ``MEMORY``, or the name of a cache tier."""

    name: str
    tokens: int


@dataclass(frozen=True, slots=True)
class WorkerShare:
    """One worker's part of a batch.

    ``active_seconds``: the time in which it had rows of this batch. ``tokens_per_second`` are
    generated tokens of that time. ``relative_speed``: that rate by the rate of the fastest worker;
    0 if its time is too short to compare.
    ``p50_ms``: the median time of its rows. ``version``: of a worker that lives, else "".
    """

    name: str
    ok: int
    failed: int
    canceled: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    active_seconds: float
    tokens_per_second: float
    relative_speed: float
    p50_ms: int
    scheme: str = ""
    version: str = ""

    @property
    def is_comparable(self) -> bool:
        """Whether it had rows for long enough to compare its speed."""
        return self.active_seconds >= COMPARED_SECONDS


@dataclass(frozen=True, slots=True)
class Example:
    """A message of a failed row."""

    line: int
    message: str


@dataclass(frozen=True, slots=True)
class FailureGroup:
    """All rows that failed with one code. ``lines`` are the first of them.

    ``examples`` are different messages, each with the first line that has it.
    """

    code: str
    count: int
    lines: tuple[int, ...]
    examples: tuple[Example, ...]


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting or version of the batch, for people."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of one batch.

    The sums of rows and tokens are in ``status``, read after the results. The rest is made of the
    results: ``num_read`` rows. ``num_copies`` of them have the answer of another row; they are
    only in the counts by outcome. ``num_unreadable`` results were not written by batchkv.
    ``latency_ms`` is from a row's admission to its end, of the ok rows, like the next two.
    ``endings`` counts them by finish reason. ``active_seconds`` is the time from ``started_at`` to
    ``ended_at`` in which rows were under way, as far as the width of the bins tells.
    """

    status: BatchStatus
    num_read: int
    num_copies: int
    num_unreadable: int
    started_at: float | None
    ended_at: float | None
    throughput: Throughput
    latency_ms: Distribution | None
    prompt_length: Distribution | None
    answer_length: Distribution | None
    sources: tuple[Source, ...]
    workers: tuple[WorkerShare, ...]
    failures: tuple[FailureGroup, ...]
    endings: tuple[tuple[str, int], ...]
    settings: tuple[Setting, ...]
    active_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens a second of ``active_seconds``."""
        return self.status.completion_tokens / max(LEAST_SECONDS, self.active_seconds)

    @property
    def is_complete(self) -> bool:
        """Whether the batch is done and all results were read."""
        return self.status.is_done and self.num_read == self.status.total
