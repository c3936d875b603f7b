"""The memory for keys and values: how much there is, how much is in use, and which rows still fit.

Every comparison of bytes with the budget is made here. Only this module asks the layouts how large
buffers are, or would become. No tensors.

Three things use memory: the slots with their windows and states, the shared prefixes of their rows,
and the group in prefill. The group is counted until its rows are in slots and its arrays are freed.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

from batchkv_worker.engine.schedule.admission import Budget
from batchkv_worker.engine.schedule.prefill_group import PrefillGroup
from batchkv_worker.kv.attention.prefix_part import PrefixPart
from batchkv_worker.kv.slots import growth
from batchkv_worker.kv.slots.changes import Demand
from batchkv_worker.kv.slots.layouts import SlotLayouts

SHRINK = 0.8  # after memory ran out, the budget is this share of the bytes that were in use
GROW = 1.05  # the factor by which the budget grows again with every row that ends
LEAST_CHUNK = 64  # tokens; chunks are not halved below this
CALM_ROWS = 64  # rows that must end well before chunks are doubled again


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes at one moment: those that may be used, and those in use."""

    allowed: int
    slots: int  # shared prefixes among them
    prefill: int  # the group in prefill, and its shared prefix if no row in a slot reads it

    @property
    def total(self) -> int:
        """All bytes in use."""
        return self.slots + self.prefill


class Memory:
    """The one owner of the budget. ``layouts`` are those of the decode slots."""

    def __init__(self, layouts: SlotLayouts, budget: Budget) -> None:
        self._layouts = layouts
        self.whole = budget  # the most that may be used
        self.budget = budget  # the most that may be used now; less after memory ran out
        self._aside_bytes = 0  # of a group whose prefill waits for live rows
        self._num_calm_rows = 0  # rows that ended well since the chunk size changed

    # -- bytes in use

    def snapshot(self, group: PrefillGroup | None = None) -> Held:
        """The bytes in use now; ``group`` is the group in prefill or on its way into slots."""
        slots = self._layouts.bytes_held(self.budget.costs)
        return Held(self.budget.memory_bytes, slots, self._prefill_bytes(group))

    def set_aside(self, group: PrefillGroup | None) -> None:
        """This group keeps its arrays while another one is in prefill; None: no group does."""
        self._aside_bytes = 0
        self._aside_bytes = self._prefill_bytes(group)

    def _prefill_bytes(self, group: PrefillGroup | None) -> int:
        if group is None:
            return self._aside_bytes
        new = self._layouts.bytes_of_new(self.budget.costs, group.shared_prefix)
        own = self.budget.group_bytes(len(group.rows), group.width, group.num_shared)
        return own + new + self._aside_bytes

    # -- which rows fit

    def fits_alone(self, demand: Demand) -> bool:
        """Whether a row fits when no other row is there; if not, it can never run."""
        alone = SlotLayouts(1, self.whole.costs.per_window)
        return Memory(alone, self.whole).fits([demand])

    def fits(
        self, demands: Items[Demand], ahead: int | None = None, shared_keys: Iterable[bytes] = ()
    ) -> bool:
        """Whether these rows fit together with those in the slots, for ``ahead`` more tokens.

        The arrays of their prefill exist until the rows have moved into the slots, and the slots
        may grow meanwhile. ``shared_keys`` are of the prefix that they share. ``ahead`` None: all
        tokens that may still come.
        """
        costs = self.budget.costs
        slots = self._layouts.peak_bytes(costs, list(demands), ahead, list(shared_keys))
        held = slots + self.budget.prefill_bytes(demands) + self._aside_bytes
        return held <= self.budget.memory_bytes

    def fits_shared_prefix(
        self,
        num_tokens: int,
        keys: list[bytes],
        computed_after: PrefixPart | None,
        group: PrefillGroup,
    ) -> bool:
        """Whether a shared prefix with these keys fits together with all bytes in use.

        Its tokens that rows in slots read already, or that are in ``computed_after``, do not count.
        """
        new = num_tokens - self._layouts.tokens_held(keys, computed_after)
        wanted = new * self.budget.costs.per_prefix_token
        return wanted + self.snapshot(group).total <= self.budget.memory_bytes

    def fits_without_others(
        self, slots: Iterable[int], most_remaining: int, group: PrefillGroup | None
    ) -> bool:
        """Whether the rows in these slots have room for some steps once all others have left."""
        lengths = [self._layouts.main.length(slot) for slot in slots]
        free = self.budget.memory_bytes - self._prefill_bytes(group)
        cells = self._layouts.max_cells(self.budget.costs, free, [], len(lengths))
        return cells is None or growth.fits(lengths, most_remaining, cells)

    def max_cells(
        self,
        group: PrefillGroup | None,
        demand: Demand | None = None,
        shared: PrefixPart | None = None,
    ) -> int | None:
        """Cells that the layers with every token may have while the group exists; None: no limit.

        ``demand`` is of a row of the group that is inserted after ``shared``. The group's own
        shared prefix is counted with the group; parts that were added to it are not.
        """
        costs, layouts = self.budget.costs, self._layouts
        free = self.budget.memory_bytes - self._prefill_bytes(group)
        free -= layouts.bytes_of_new(costs, shared, group.shared_prefix if group else None)
        return layouts.max_cells(costs, free, [] if demand is None else [demand])

    # -- when it runs out, or the device fails

    def shrink(self, held: int) -> None:
        """Memory ran out with ``held`` bytes in use: from now on less is used."""
        num_bytes = int(min(held, self.budget.memory_bytes) * SHRINK)
        self.budget = self.budget.shrunk_to(num_bytes)

    def halve_chunk(self) -> None:
        """The device failed: from the next group on, prompts are computed in smaller chunks."""
        self._set_chunk(
            max(self.budget.chunk_tokens // 2, min(LEAST_CHUNK, self.whole.chunk_tokens))
        )

    def _set_chunk(self, tokens: int) -> None:
        self._num_calm_rows = 0
        self.budget = replace(self.budget, chunk_tokens=tokens)

    def relax(self) -> None:
        """A row has ended well: a little more may be used again, up to the whole budget."""
        now, whole = self.budget.memory_bytes, self.whole.memory_bytes
        if now < whole:
            self.budget = self.budget.shrunk_to(min(whole, int(now * GROW) + whole // 256 + 1))
        if self.budget.chunk_tokens < self.whole.chunk_tokens:
            self._num_calm_rows += 1
            if self._num_calm_rows >= CALM_ROWS:
                self._set_chunk(min(2 * self.budget.chunk_tokens, self.whole.chunk_tokens))
