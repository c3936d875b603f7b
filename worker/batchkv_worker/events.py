"""The messages between the main thread (RQ) and the engine's thread. No MLX.

The main thread sends ``Work`` and ids of jobs to cancel. The engine sends one ``Completed`` or
``Rejected`` for each row that was not cancelled. When it cannot go on, it sends ``EngineDied`` as
its last message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from batchkv_producer.wire.cache_note import CacheNote
from batchkv_producer.wire.choice import Choice, TokenLogprob, ToolCall
from batchkv_producer.wire.job import Request, Usage
from batchkv_producer.wire.live import Pieces
from batchkv_producer.wire.maker import Maker
from batchkv_worker.figures.engine import EngineFigures, Progress


@dataclass(frozen=True, slots=True)
class Work:
    """One row to generate. ``job_id`` names it in every event.

    ``shared_bytes``: how many bytes of its text another row of its batch begins with; None when
    that is not known. ``elsewhere_bytes``: how many of them rows of other workers may begin with;
    None if unknown. ``slowdown``: how many times slower the slowest other worker computes.
    ``is_live``: somebody waits for it, so it goes before all other rows, and its
    text is sent as it is made (``Piece``), as far as ``pieces`` says.
    """

    job_id: str
    request: Request
    shared_bytes: int | None = None
    is_live: bool = False
    pieces: Pieces = "text"
    elsewhere_bytes: int | None = None
    slowdown: float = 1.0

    @property
    def num_choices(self) -> int:
        """How many choices the engine decodes for it. Each takes a slot, as a row does.

        At temperature 0 all choices are equal, so that one is enough.
        """
        return 1 if self.request.params.temperature == 0 else self.num_wanted

    @property
    def num_wanted(self) -> int:
        """How many choices its result has. The engine refuses a number that is out of range."""
        return max(1, self.request.params.n or 1)


@dataclass(frozen=True, slots=True)
class Completed:
    """A row that ended by itself: ``finish_reason`` is "stop", "length" or "tool_calls".

    ``text`` to ``logprobs``, ``reasoning`` and ``tool_calls`` are of the row's first choice, and
    ``more`` has the others. ``token_ids`` are always those of the first choice. The result stores
    them only if ``prompt_token_ids`` is set, which says that the row asked for token ids.
    ``saved_ms``: how long computing its cached tokens would have taken, as measured lately.
    ``note``: what the shared store had.
    """

    job_id: str
    text: str
    finish_reason: str
    usage: Usage
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    saved_ms: int = 0
    note: CacheNote | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    prompt_token_ids: tuple[int, ...] | None = None
    more: tuple[Choice, ...] = ()


@dataclass(frozen=True, slots=True)
class Rejected:
    """A row that cannot be generated: ``code`` is one of ``job.ErrorCode``."""

    job_id: str
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Piece:
    """More of the text of a live row's answer, or of its thought. All pieces of a kind are how
    that part begins.
    """

    job_id: str
    text: str
    is_thought: bool = False


@dataclass(frozen=True, slots=True)
class EngineDied:
    """The engine's thread has ended; its rows must go back to the queue.

    ``is_device_fault``: the device failed, for no reason of the rows. It is no death of theirs.
    """

    reason: str
    is_device_fault: bool = False


@dataclass(frozen=True, slots=True)
class Serving:
    """The engine serves the model with this adapter from now on; "" is the model alone."""

    adapter: str


@dataclass(frozen=True, slots=True)
class Recalled:
    """Rows that were recalled: cancelled before any of their tokens was computed."""

    job_ids: tuple[str, ...]


Event = Completed | Rejected | Piece | EngineDied


class EngineLike(Protocol):
    """The engine as its thread drives it. All calls come from that one thread.

    ``num_slots``: how many rows it decodes at once. ``max_in_flight``: how many rows it wants to
    have. These are its slots, and some waiting rows that refill a free slot without a call to
    Redis. Each choice of a row (``Work.num_choices``) counts as a row in both, and in ``recall``.
    """

    @property
    def num_slots(self) -> int: ...

    @property
    def max_in_flight(self) -> int: ...

    @property
    def maker(self) -> Maker:
        """The model and scheme that its answers are made with; never changes."""
        ...

    @property
    def is_idle(self) -> bool: ...

    def add(self, work: Work) -> None: ...

    def cancel(self, job_id: str) -> None:
        """Cancel a row; unknown ids are ignored. No event follows."""

    def recall(self, job_ids: Sequence[str], count: int) -> list[str]:
        """Cancel up to ``count`` of these rows, the last first, if nothing of them was computed.

        A row with more choices than are left of ``count`` stays. Returns the ids of the rows.
        """
        ...

    def step(self) -> list[Event]:
        """Compute prompt chunks and one decode step. Returns events of rows that ended."""
        ...

    def rest(self) -> None:
        """Give memory back that idle rows do not need; called every few seconds while idle."""

    def close(self) -> None: ...

    def report(self) -> str:
        """What it was doing, in one line without content. From any thread; never waits."""
        ...

    def trouble(self) -> str:
        """Why it computes less than it could, in a few words; mostly empty. From any thread."""
        ...

    def has_changed(self) -> bool:
        """Whether the model's files have changed since they were loaded. From any thread."""
        ...

    def memory_bytes(self) -> int:
        """Bytes that it had allocated on the device after its last step. From any thread."""
        ...


@runtime_checkable
class HasFigures(EngineLike, Protocol):
    """An engine that counts what it does."""

    def figures(self) -> EngineFigures:
        """What it has counted since the worker began, and what it holds. From any thread."""
        ...


@runtime_checkable
class HasProgress(EngineLike, Protocol):
    """An engine that says how far it is."""

    def progress(self) -> Progress:
        """The rows that it has, and the tokens that it has computed. From any thread, quickly."""
        ...


@runtime_checkable
class PreparesAhead(EngineLike, Protocol):
    """An engine whose rows may be prepared on other threads, while it computes.

    ``prepares_ahead``: on how many threads at once its tokenizer allows that. If on none, rows come
    by ``add`` alone.
    """

    @property
    def prepares_ahead(self) -> int: ...

    def prepare(self, work: Work) -> Callable[[], None]:
        """Do all of ``add`` that needs no MLX and changes no state of the engine.

        From other threads, from ``prepares_ahead`` at once. The engine's thread then calls what it
        returns: this adds the row, or refuses it.
        """
        ...


@runtime_checkable
class ExchangesAdapters(EngineLike, Protocol):
    """An engine of one model with several adapters, of which it has one at a time, or none."""

    makers: Mapping[str, Maker]  # of answers, by the name of the adapter; "" is the model alone

    def serve(self, adapter: str) -> None:
        """Exchange the adapter. Only while the engine is idle."""
