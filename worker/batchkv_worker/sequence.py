"""One row while it is being generated: everything about it stands here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from batchkv_cache_store.keys import BLOCK_TOKENS
from batchkv_producer.wire.job import TokenLogprob

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

    @property
    def is_greedy(self) -> bool:
        return self.temperature < SMALLEST_TEMPERATURE

    @property
    def has_filter(self) -> bool:
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


class FetchState(Enum):
    """Where a row's lookup in the shared store stands."""

    NEW = auto()
    ASKED = auto()
    HELD = auto()  # another worker computes its next block: asked again in a while
    DONE = auto()  # its prompt may be computed from what is here now


@dataclass(slots=True, eq=False)
class Fetch:
    """A row's lookup. Times are of ``time.monotonic``; the last fields tell how it went.

    ``found`` blocks came from the shared store; ``stop`` says why not more
    (``lookup.Found.stop``, or "held", or "slow").
    """

    state: FetchState = FetchState.NEW
    asked_at: float = 0.0
    held_since: float = 0.0
    deepest: int = 0  # blocks that were here at once, at most
    num_bytes: int = 0  # fetched and not yet used
    num_expected: int = 0  # that the lookup under way may bring
    found: int = 0
    stop: str = ""


@dataclass(slots=True, eq=False)
class Sequence:
    """A row from admission to its end.

    ``num_dispatched`` counts the tokens whose computation has been started; ``generated`` those
    that have been read back. They differ while a step is in flight. A row that left its slot for a
    while comes back as if its ``num_resumed`` first generated tokens had been its prompt's last.
    """

    job_id: str
    prompt: list[int]
    generation: Generation
    slot: int | None = None
    num_dispatched: int = 0
    num_overtaken: int = 0  # groups that were formed before it while it was the oldest
    num_cached: int = 0  # prompt tokens that were here already
    depth_seen: tuple[int, int] = (-1, 0)  # version of the prefix memory, and blocks it had then
    block_keys: list[bytes] = field(default_factory=list)  # of the prompt's full blocks
    num_common: int | None = None  # tokens that another row of the batch begins with
    state_stops: frozenset[int] = frozenset()  # tokens after which states are kept
    fetch: Fetch | None = None  # its lookup in the shared store
    is_converted: bool = False  # it goes on from blocks that another scheme rounded first
    generated: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    detokenizer: Any = None  # only rows with stop strings follow their text as it grows
    finish_reason: str = ""
    num_resumed: int = 0
    num_shared: int = 0  # tokens that stood in a stem when it left its slot
    parked: bytes = b""  # under which its slot's content is held until it comes back
    num_preempted: int = 0  # how often it had to leave its slot
    first_cached: int = -1  # ``num_cached`` when it came in first; -1: it never had to leave
    num_failures: int = 0  # how often memory ran out while it was alone
    twin_of: Sequence | None = None  # the row that this one repeats without the cache, see audit

    @property
    def num_prefill(self) -> int:
        """Tokens to compute before decoding: all but the last, which the first step takes."""
        return len(self.prompt) + self.num_resumed - 1

    def tokens(self, start: int, end: int) -> list[int]:
        """Tokens [start, end) of the prompt and the answer after it."""
        length = len(self.prompt)
        return (
            self.prompt[start:end] + self.generated[max(0, start - length) : max(0, end - length)]
        )

    @property
    def num_common_blocks(self) -> int:
        """Full blocks that others of the batch begin with; all, if nobody knows."""
        known = self.num_common is not None
        return (self.num_common or 0) // BLOCK_TOKENS if known else len(self.block_keys)

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be dispatched."""
        return self.generation.max_tokens - self.num_dispatched

    @property
    def is_begun(self) -> bool:
        """Whether it was computed before, and had to wait again."""
        return self.num_preempted > 0 or self.num_failures > 0 or bool(self.generated)

    @property
    def is_ended(self) -> bool:
        return bool(self.finish_reason)

    def set_back(self) -> None:
        """It leaves its slot and waits again: what it has generated is kept, as more of a prompt.

        Everything that was sampled must have been read back, or is sampled again.
        """
        if self.first_cached < 0:
            self.first_cached = self.num_cached
        self.num_resumed = self.num_dispatched = len(self.generated)
        self.depth_seen = (-1, 0)

    def come_back(self) -> None:
        """It is in a slot again: its books tell of its prompt alone."""
        if self.first_cached >= 0:
            self.num_cached = self.first_cached
            self.block_keys = self.block_keys[: (len(self.prompt) - 1) // BLOCK_TOKENS]
            self.depth_seen = (-1, 0)

    def last_tokens(self, count: int) -> list[int]:
        """The last ``count`` tokens before the one being fed; short rows repeat their first."""
        is_read = len(self.generated) == self.num_dispatched  # the one being fed, too
        known = self.prompt[-count - 1 :] + self.generated[-count - 1 :] if count else []
        known = (known[:-1] if is_read else known)[-count:] if count else []
        return [known[0]] * (count - len(known)) + known if known else [self.prompt[0]] * count
