"""The arguments and results of the moves in ``transitions``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any


def iso_now() -> str:
    """The present time in the format of RQ's job hashes."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A batch on the server: chunks enqueued so far and in all, the version of their order.

    ``expires`` is seconds since 1970, ``keep_seconds`` counts from the end; 0 is none. ``fits``:
    its maker does not differ from the caller's in any known part. ``style`` is that of plain
    prompts; empty in batches of versions that had no styles.
    """

    digest: str
    num_enqueued: int
    num_chunks: int
    order: int
    priority: str = "normal"
    expires: int = 0
    keep_seconds: int = 0
    is_deduped: bool = False
    fits: bool = True
    is_forgotten: bool = False  # `batchkv forget` is deleting it
    style: str = ""
    is_reusing: bool = False  # rows may end with remembered answers

    @classmethod
    def of(cls, reply: list[Any]) -> BatchRecord:
        """Read the script's answer."""
        fits, digest, chunks, num_chunks, order, priority, expires, keep, *rest = reply
        dedupe, forgotten, style, reuse = rest
        return cls(
            digest.decode("utf-8", "replace"),
            int(chunks),
            int(num_chunks),
            int(order or 1),
            (priority or b"normal").decode(),
            int(expires or 0),
            int(keep or 0),
            bool(dedupe),
            bool(fits),
            bool(forgotten),
            (style or b"").decode(),
            reuse is not None,
        )


@dataclass(frozen=True, slots=True)
class JobLease:
    """A lease: this execution holds this job."""

    job_id: str
    execution: str


@dataclass(frozen=True, slots=True)
class Pulled:
    """A job just taken: its lease, its raw data (empty when too large), its earlier deaths.

    ``timeout_seconds`` is RQ's timeout of the job; 0 or less means none. ``seconds_left`` are those
    to the batch's deadline. ``rank`` is the index of its priority in ``redis_keys.PRIORITIES``.
    ``shared_bytes``: see ``planner.Chunk``; None if the producer did not store it.
    ``has_begun``: whether Redis has it as begun. ``finish`` reports the others. ``is_reusing``: its
    answer is to be remembered for later batches.
    """

    lease: JobLease
    data: bytes
    num_deaths: int = 0
    timeout_seconds: int = 0
    seconds_left: float = math.inf
    rank: int = 1
    shared_bytes: int | None = None
    has_begun: bool = True
    is_reusing: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive jobs taken from the queue's head, and the lengths of its lists afterwards.

    ``num_passed``: suspects that were skipped. ``unfit``: for each list, the number of entries seen
    that other workers must compute. ``has_more``: the entries after these were not read.
    ``is_apart``: the jobs are suspects of one group, and nothing else may run with them.
    ``num_reused``: rows that this pull has ended with remembered answers.
    """

    jobs: list[Pulled]
    lengths: tuple[int, ...]
    num_passed: int = 0
    unfit: tuple[int, ...] = (0, 0, 0)
    has_more: bool = False
    is_apart: bool = False
    num_reused: int = 0

    @classmethod
    def of(cls, reply: list[Any], num_begin: int) -> Run:
        """Read the script's answer. Its first ``num_begin`` jobs have begun."""
        lengths, place, taken, num_passed, unfit, has_more, is_apart, num_reused = reply
        jobs = [
            Pulled(
                JobLease(job.decode(), execution.decode()),
                data,
                int(deaths),
                int(timeout),
                float(left) if left else math.inf,
                int(place) - 1,
                int(shared) if shared.isdigit() else None,
                index < num_begin,
                bool(reuse),
            )
            for index, (job, execution, data, deaths, timeout, left, shared, reuse) in enumerate(
                taken
            )
        ]
        counts = tuple(map(int, lengths)), int(num_passed), tuple(map(int, unfit))
        return cls(jobs, *counts, bool(has_more), bool(is_apart), int(num_reused))

    @property
    def num_queued(self) -> int:
        """Entries of all priorities."""
        return sum(self.lengths)


@dataclass(frozen=True, slots=True)
class ReuseLimits:
    """How long answers are remembered, how many, and how many bytes of them. 0 bytes: none."""

    keep_seconds: int = 7 * 86_400
    max_answers: int = 100_000
    max_bytes: int = 100_000_000


NOTHING_REMEMBERED = ReuseLimits(max_bytes=0)


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a held job ended, ready to be stored."""

    lease: JobLease
    outcome: str  # "ok" or "failed"
    result: bytes
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    busy_ms: int = 0
    saved_ms: int = 0
    is_cut: bool = False  # ok, but its answer was cut at max_tokens
    digest: bytes = b""  # of its request, if its answer is to be remembered

    @property
    def kind(self) -> str:
        """Its name in ``finish.lua``."""
        return "cut" if self.is_cut and self.outcome == "ok" else self.outcome
