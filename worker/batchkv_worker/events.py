"""What passes between the RQ side (main thread) and the engine (its own thread). No MLX here.

The main thread hands over ``Work`` and job ids to cancel; the engine answers with ``Completed``
and ``Rejected``, one of them for every piece of work that was not cancelled, and ``EngineDied``
once, last, when it cannot go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from batchkv_producer.wire.cache_note import CacheNote
from batchkv_producer.wire.job import Request, TokenLogprob, Usage
from batchkv_producer.wire.maker import Maker


@dataclass(frozen=True, slots=True)
class Work:
    """One row to generate. ``job_id`` names it in every event.

    ``shared_bytes``: how much of its text another row of its batch begins with; None when nobody
    knows.
    """

    job_id: str
    request: Request
    shared_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Completed:
    """A row that ended by itself: ``finish_reason`` is "stop" or "length".

    ``saved_ms``: what computing its cached tokens would have taken, as measured lately. ``note``:
    what the shared cache had.
    """

    job_id: str
    text: str
    finish_reason: str
    usage: Usage
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    saved_ms: int = 0
    note: CacheNote | None = None


@dataclass(frozen=True, slots=True)
class Rejected:
    """A row that cannot be generated: ``code`` is one of ``job.ErrorCode``."""

    job_id: str
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class EngineDied:
    """The engine's thread ended; everything it still held must go back to the queue."""

    reason: str


@dataclass(frozen=True, slots=True)
class Recalled:
    """Rows that the engine was asked to forget, and of which it had computed nothing."""

    job_ids: tuple[str, ...]


Event = Completed | Rejected | EngineDied


class EngineLike(Protocol):
    """The engine as its thread drives it. All calls come from that one thread.

    ``max_in_flight`` is how many rows the engine wants to hold: its slots plus a few that wait
    so that a free slot is refilled without asking Redis.
    """

    @property
    def max_in_flight(self) -> int: ...

    @property
    def maker(self) -> Maker:
        """What its answers are made with; never changes."""
        ...

    @property
    def is_idle(self) -> bool: ...

    def add(self, work: Work) -> None: ...

    def cancel(self, job_id: str) -> None:
        """Forget a row; unknown ids are ignored. No event follows."""

    def recall(self, job_ids: Sequence[str], count: int) -> list[str]:
        """Forget up to ``count`` of these rows, the last first; the ids of those forgotten.

        Only rows of which nothing was computed.
        """
        ...

    def step(self) -> list[Event]:
        """Do one unit of work (a prefill chunk, a decode step) and tell what ended."""
        ...

    def close(self) -> None: ...

    def report(self) -> str:
        """What it was doing, in a line without any content. From any thread; never waits."""
        ...

    def has_changed(self) -> bool:
        """Whether the model's files are others now than were loaded. From any thread."""
        ...

    def memory_bytes(self) -> int:
        """What it has allocated on the device, as of its last step. From any thread."""
        ...
