"""What the moves of ``transitions`` take and give."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Standing:
    """A batch on the server: chunks enqueued so far and in all, the version of their order.

    ``expires`` is seconds since 1970, ``keep_seconds`` counts from the end; 0 is none.
    """

    digest: str
    num_enqueued: int
    num_chunks: int
    order: int
    priority: str = "normal"
    expires: int = 0
    keep_seconds: int = 0
    is_deduped: bool = False

    @classmethod
    def of(cls, reply: list[Any]) -> Standing:
        """From what the script answers."""
        digest, chunks, num_chunks, order, priority, expires, keep, dedupe = reply
        return cls(
            digest.decode("utf-8", "replace"),
            int(chunks),
            int(num_chunks),
            int(order or 1),
            (priority or b"normal").decode(),
            int(expires or 0),
            int(keep or 0),
            bool(dedupe),
        )


@dataclass(frozen=True, slots=True)
class Held:
    """A lease: this execution holds this job."""

    job_id: str
    execution: str


@dataclass(frozen=True, slots=True)
class Pulled:
    """A job just taken: its lease, its raw data (empty when too large), its earlier deaths.

    ``timeout_seconds`` is RQ's timeout of the job; 0 or less means none. ``seconds_left`` are those
    to the batch's deadline. ``rank`` is the index of its priority in ``redis_keys.PRIORITIES``.
    ``shared_bytes``: see ``planner.Chunk``; None for a job of a producer that did not say it.
    """

    lease: Held
    data: bytes
    num_deaths: int = 0
    timeout_seconds: int = 0
    seconds_left: float = math.inf
    rank: int = 1
    shared_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbours just taken from the queue's head, and how many entries its lists still have."""

    jobs: list[Pulled]
    lengths: tuple[int, ...]

    @property
    def num_queued(self) -> int:
        """Entries of all priorities."""
        return sum(self.lengths)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a held job ended, ready to be stored."""

    lease: Held
    outcome: str  # "ok" or "failed"
    result: bytes
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    busy_ms: int = 0
    saved_ms: int = 0
