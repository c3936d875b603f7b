"""The budget for keys and values, and how many tokens to expect of a row. No tensors.

``memory`` compares the two, and ``scheduler`` admits.

A row is admitted by its prompt and the tokens that it will generate. *Worst case*: all tokens that
it may generate. *Optimistic*: the length of most recent answers. A row whose answer is longer may
have to leave its slot for a while (``decode_rows``). In both cases the budget limits the buffers
whenever they grow, not only when a row is admitted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

from batchkv_cache_store.keys import BLOCK_TOKENS
from batchkv_worker.kv.slots.changes import Demand
from batchkv_worker.kv.slots.growth import round_up
from batchkv_worker.kv.slots.layouts import Costs

RECENT_OUTPUTS = 512  # outputs whose lengths are stored
FEWEST_OUTPUTS = 16  # outputs that must have ended before a length is expected
MOST_OF_TEN = 9  # of ten outputs are no longer than the expected length


class OutputLengths:
    """Lengths of recent outputs, in tokens."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=RECENT_OUTPUTS)
        self._expected: int | None = None

    def add(self, num_tokens: int) -> None:
        """Count the output of a row that has ended."""
        self._recent.append(num_tokens)
        self._expected = None

    @property
    def mean(self) -> float | None:
        """The mean length; None before FEWEST_OUTPUTS rows have ended."""
        known = len(self._recent)
        return sum(self._recent) / known if known >= FEWEST_OUTPUTS else None

    @property
    def expected(self) -> int | None:
        """Tokens that suffice for most outputs; None before FEWEST_OUTPUTS rows have ended."""
        if len(self._recent) < FEWEST_OUTPUTS:
            return None
        if self._expected is None:
            ranked = sorted(self._recent)
            self._expected = ranked[(len(ranked) - 1) * MOST_OF_TEN // 10]
        return self._expected


@dataclass(frozen=True, slots=True)
class Budget:
    """The scheduler's limits: tokens of a prefill chunk, and bytes of keys and values.

    The width of prompts is rounded up to a multiple of ``shape_step`` at most. ``chunk_steps`` is
    what a chunk costs besides its tokens, in decode steps.
    """

    chunk_tokens: int
    memory_bytes: int
    costs: Costs
    shape_step: int = 1
    chunk_steps: float = 0.0

    def prefill_bytes(self, demands: Items[Demand]) -> int:
        """Bytes of these rows as a group in prefill."""
        length = max((demand.length for demand in demands), default=0)
        shared = min((demand.shared for demand in demands), default=0)
        return self.group_bytes(len(demands), length, shared)

    def group_bytes(self, num_rows: int, length: int, shared: int) -> int:
        """Bytes of a group in prefill: every row takes the ``length`` of the longest."""
        margin = self.chunk_tokens + BLOCK_TOKENS
        return num_rows * self.costs.prefill(round_up(length, self.shape_step), shared, margin)

    def shrunk_to(self, memory_bytes: int) -> Budget:
        """The same with less memory."""
        return replace(self, memory_bytes=memory_bytes)
