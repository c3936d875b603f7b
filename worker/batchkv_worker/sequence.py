"""One row from its prompt to its end. Only this module changes a row's phase.

A row goes this way::

    WAITING -> PREFILL -> DECODE -> LAST_TOKEN -> ENDED
                  ^          |
                  +-- PREEMPTED

A row is also preempted during PREFILL or LAST_TOKEN when memory runs out. It may end in any phase:
it is cancelled, or fails.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol

from batchkv_cache_store.keys import BLOCK_TOKENS
from batchkv_producer.wire.job import TokenLogprob
from batchkv_worker.guide import Guide

SMALLEST_TEMPERATURE = 1e-5  # below, logits over temperature are no longer numbers: greedy


@dataclass(frozen=True, slots=True)
class Generation:
    """A row's parameters with every default filled in (compare ``job.SamplingParams``)."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    include_stop: bool = False  # the stop string stays in the text
    return_token_ids: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()  # sorted by token
    bad_words: tuple[tuple[int, ...], ...] = ()  # tokens of each
    late_tokens: frozenset[int] = frozenset()  # end tokens, barred before ``min_tokens``
    hidden_tokens: frozenset[int] = frozenset()  # without text: special ones, mostly

    @property
    def is_greedy(self) -> bool:
        return self.temperature < SMALLEST_TEMPERATURE

    @property
    def is_counted(self) -> bool:
        """Whether it matters how often each token was generated."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def is_penalized(self) -> bool:
        """Whether a token's logit depends on the tokens before."""
        return self.repetition_penalty != 1 or self.is_counted

    @property
    def has_filter(self) -> bool:
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


class FetchState(Enum):
    """The state of a row's lookup in the shared store."""

    NEW = auto()
    ASKED = auto()
    HELD = auto()  # another worker computes its next block: looked up again later
    DONE = auto()  # its prompt may be computed now


@dataclass(slots=True, eq=False)
class Fetch:
    """A row's lookup. Times are of ``time.monotonic``.

    ``found`` blocks came from the shared store, ``tiers`` by the name of their tier; ``stop`` says
    why not more (``lookup.Found.stop``, "held", "slow" or "alone").
    """

    state: FetchState = FetchState.NEW
    asked_at: float = 0.0
    is_far: bool = False  # the pending lookup crosses a network
    held_since: float = 0.0
    deepest: int = 0  # most blocks that were here at one time
    num_bytes: int = 0  # fetched and not used yet
    num_expected: int = 0  # bytes that the pending lookup may bring
    depth_before: int = (
        -1
    )  # blocks that were here before the first one of the lookup; -1: none came
    found: int = 0
    stop: str = ""
    tiers: dict[str, int] = field(default_factory=dict)

    def count(self, tiers_of_blocks: Iterable[str]) -> None:
        """Count blocks of the shared store, by the names of their tiers."""
        for name in tiers_of_blocks:
            self.found += 1
            self.tiers[name] = self.tiers.get(name, 0) + 1


class Status(Enum):
    """The phase of a row."""

    WAITING = auto()  # in the scheduler's queue, never computed
    PREFILL = auto()  # in the group whose prompts are computed
    DECODE = auto()  # in a slot
    LAST_TOKEN = auto()  # its last token is being computed; it needs its slot no more
    PREEMPTED = auto()  # in the scheduler's queue again
    ENDED = auto()  # ``finish_reason`` says how


# From each phase but the last, a row may also end.
_NEXT = {
    Status.WAITING: {Status.PREFILL},
    Status.PREFILL: {Status.DECODE, Status.PREEMPTED},
    Status.DECODE: {Status.LAST_TOKEN, Status.PREEMPTED},
    Status.LAST_TOKEN: {Status.PREEMPTED},
    Status.PREEMPTED: {Status.PREFILL},
    Status.ENDED: set[Status](),
}


class TextStream(Protocol):
    """The text of a row as far as it is certain (``engine.tokens.text_stream``).

    The pieces that are new, and whether each is of the thought.
    """

    def next(self, row: Sequence) -> list[tuple[str, bool]]: ...


@dataclass(slots=True, eq=False)
class Sequence:
    """A row from its prompt's tokens to its end.

    The scheduler, the decode rows and the engine call the methods below where the row's phase
    changes. Only those methods write ``status``, ``slot``, ``finish_reason`` and the counts.

    ``num_dispatched`` counts the tokens whose computation has been started; ``generated`` those
    that have been read back. They differ while a step is in flight. A row that left its slot for a
    while comes back as if its ``num_resumed`` first generated tokens had been its prompt's last.
    """

    job_id: str
    prompt: list[int]
    generation: Generation
    came_at: float = field(default_factory=time.monotonic)  # into the engine
    status: Status = Status.WAITING
    slot: int | None = None
    num_dispatched: int = 0
    num_overtaken: int = 0  # groups formed before it while it was the oldest
    num_cached: int = 0  # prompt tokens found in the prefix memory
    depth_seen: tuple[int, int] = (-1, 0)  # version of the prefix memory, and the blocks found then
    block_keys: list[bytes] = field(default_factory=list)  # of the prompt's full blocks
    partial_keys: list[bytes] = field(default_factory=list)  # of its partial blocks
    cache_salt: str | None = None  # it shares blocks with rows of the same salt alone
    num_common: int | None = None  # tokens that another row of the batch begins with
    num_elsewhere: int | None = None  # tokens that rows of other workers may begin with
    slowdown: float = 1.0  # how many times slower than this worker the slowest other one is
    state_stops: frozenset[int] = frozenset()  # tokens after which states are kept
    fetch: Fetch | None = None  # its lookup in the shared store
    is_converted: bool = False  # it uses blocks that another scheme rounded first
    generated: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    detokenizer: Any = None  # only for rows with stop strings
    reader: Any = None  # divides its output into parts (``outputs.Reader``); None: all is text
    guide: Guide | None = None  # has taken ``generated``; says which tokens may follow
    token_counts: Any = None  # of the sampler, for penalties
    biases: Any = None  # of the sampler, for what is added to logits
    num_exempt_chars: int = 0  # of its text: a stop string must end after them (``min_tokens``)
    finish_reason: str = ""
    num_resumed: int = 0
    num_shared: int = 0  # tokens in a shared prefix when it was preempted
    parked: bytes = b""  # key of its slot's content while that is kept
    num_preempted: int = 0  # how often it had to wait again for room
    first_cached: int = -1  # ``num_cached`` of its prompt; -1: it was never preempted
    num_failures: int = 0  # how often memory ran out while it was alone
    replay_of: Sequence | None = None  # the row that this one repeats without the cache, see audit
    is_live: bool = False  # somebody waits for it: it goes before rows of batches
    stream: TextStream | None = None  # sends its text as it is made; only of live rows
    choice: int = 0  # its number among the choices of its row, see ``engine.tokens.choices``
    first_choice: Sequence | None = None  # of its row; None: it is the first, or the only one
    unqueued: list[Sequence] = field(default_factory=list)  # choices that wait for its prompt

    @property
    def num_prefill(self) -> int:
        """Tokens to compute before decoding: all but the last, which the first step takes."""
        return len(self.prompt) + self.num_resumed - 1

    def tokens(self, start: int, end: int) -> list[int]:
        """Tokens [start, end) of the prompt followed by the output."""
        length = len(self.prompt)
        return (
            self.prompt[start:end] + self.generated[max(0, start - length) : max(0, end - length)]
        )

    @property
    def num_common_blocks(self) -> int:
        """Full blocks that another row of the batch begins with; all, if that is not known."""
        known = self.num_common is not None
        return (self.num_common or 0) // BLOCK_TOKENS if known else len(self.block_keys)

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.generation.max_tokens - self.num_dispatched

    @property
    def is_begun(self) -> bool:
        """Whether it was computed before and waits or waited again."""
        return self.num_preempted > 0 or self.num_failures > 0 or bool(self.generated)

    @property
    def row_id(self) -> str:
        """The id of its job: that of the first choice of its row."""
        return (self.first_choice or self).job_id

    @property
    def is_ended(self) -> bool:
        return self.status is Status.ENDED

    # -- its phases

    def _become(self, status: Status) -> None:
        allowed = status in _NEXT[self.status]
        assert allowed, f"row {self.job_id}: {status.name} cannot follow {self.status.name}"
        self.status = status

    def pass_over(self) -> None:
        """A group was formed before it although it is the oldest row."""
        self.num_overtaken += 1

    def start_prefill(self, state_stops: frozenset[int]) -> None:
        """Its prompt is computed with the next group; states are kept after ``state_stops``."""
        self._become(Status.PREFILL)
        self.state_stops = state_stops

    def enter_slot(self, slot: int) -> None:
        """It decodes in this slot.

        What it has generated is part of its answer again, if it was preempted: ``num_cached`` and
        ``block_keys`` are of its prompt alone.
        """
        self._become(Status.DECODE)
        self.slot = slot
        if self.first_cached >= 0:
            self.num_cached = self.first_cached
            self.block_keys = self.block_keys[: (len(self.prompt) - 1) // BLOCK_TOKENS]
            self.depth_seen = (-1, 0)

    def move_to(self, slot: int) -> None:
        """Its keys and values were copied to another slot."""
        assert self.status is Status.DECODE
        self.slot = slot

    def queue_choices(self) -> list[Sequence]:
        """Its prompt is computed: the other choices of its row, which are queued now."""
        found, self.unqueued = self.unqueued, []
        for choice in found:
            choice.is_converted = self.is_converted
            choice.guide = self.guide and self.guide.fresh()
        return found

    def start_step(self) -> None:
        """A decode step that samples one token for it was built."""
        assert self.status is Status.DECODE
        self.num_dispatched += 1
        if self.num_remaining == 0:
            self._become(Status.LAST_TOKEN)

    def leave_slot(self) -> None:
        """Its slot was released. Its phase says why."""
        self.slot = None

    def park(self, key: bytes, num_shared: int) -> None:
        """The content of its slot is stored under ``key``, after ``num_shared`` shared tokens."""
        self.parked, self.num_shared = key, num_shared

    def unpark(self) -> None:
        """The content of its slot was copied back, or is lost."""
        self.parked = b""

    def resume_after(self, block_keys: list[bytes], partial_keys: list[bytes]) -> None:
        """It will go on after the tokens read so far: they count as part of its prompt.

        The keys are of all those tokens; empty when it uses no cached block.
        """
        self.num_resumed = len(self.generated)
        self.block_keys, self.partial_keys = block_keys, partial_keys

    def preempt(self) -> None:
        """It waits again because there was no room; tokens that were read are kept."""
        self.num_preempted += 1
        self._wait_again()

    def recompute(self, *, was_alone: bool) -> None:
        """It waits again because memory ran out; tokens that were read are kept.

        ``was_alone``: no other row took memory, so this counts as a failure of the row.
        """
        self.num_failures += was_alone
        self._wait_again()

    def _wait_again(self) -> None:
        self._become(Status.PREEMPTED)
        self.slot = None
        if self.first_cached < 0:
            self.first_cached = self.num_cached
        # Tokens that were sampled and not read are sampled again.
        self.num_resumed = self.num_dispatched = len(self.generated)
        self.depth_seen = (-1, 0)

    def end(self, finish_reason: str) -> None:
        """It ends, or is no longer needed: "stop", "length", "canceled" or "error"."""
        self.status = Status.ENDED
        self.finish_reason = finish_reason
