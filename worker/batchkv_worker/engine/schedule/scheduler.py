"""What to compute next. Knows rows and memory, no tensors, and is tested without MLX."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice, pairwise

from batchkv_cache_store.keys import BLOCK_TOKENS
from batchkv_cache_store.uses import Uses
from batchkv_worker.engine.schedule.admission import AnswerLengths, Budget
from batchkv_worker.engine.schedule.memory import Memory
from batchkv_worker.engine.schedule.policy import longest_first
from batchkv_worker.engine.schedule.prefill_group import PrefillGroup
from batchkv_worker.engine.schedule.prefix_split import Cuts, StemCosts, cuts_of, num_blocks
from batchkv_worker.kv.attention.prefix_part import PrefixPart
from batchkv_worker.kv.slots.layouts import SlotLayouts
from batchkv_worker.sequence import Sequence

__all__ = ["Budget", "PrefillGroup", "Scheduler"]

LOOKAHEAD = 256  # waiting rows among which a group of like length is sought
STATE_INTERVAL = 16  # blocks after which a state is kept wherever prompts part
MAX_PREEMPTIONS = 2  # after which a row is admitted by its worst case and left in peace


class Scheduler:
    """Rows that wait, the group in prefill, and which group comes next."""

    def __init__(
        self,
        layouts: SlotLayouts,
        budget: Budget,
        num_cached: Callable[[Sequence], int] = lambda row: 0,
        is_ready: Callable[[Sequence], bool] = lambda row: True,
        *,
        ragged: bool = True,
        state_blocks: int = 0,
        shares: bool = False,
        stem_costs: StemCosts | None = None,
        drop_buffers: Callable[[], None] | None = None,
        is_optimistic: bool = False,
        uses: Uses[bytes] | None = None,
    ) -> None:
        self.layouts = layouts
        self.memory = Memory(layouts, budget)
        self._num_cached = num_cached  # tokens of a row's prefix that need no computing
        self._is_ready = is_ready  # whether a row need not wait for its prefix any more
        self._ragged = ragged  # whether rows of unequal length may share a chunk
        self._drop_buffers = drop_buffers or layouts.drop  # called when no row is in a slot
        self._shares = shares  # whether rows may share stems
        self._stem_costs = stem_costs or StemCosts()
        self._state_blocks = state_blocks  # blocks after which states are worth keeping, at most
        self._is_optimistic = is_optimistic
        self.answers = AnswerLengths()
        self._group: PrefillGroup | None = None
        self._waiting: deque[Sequence] = deque()
        self._uses = Uses() if uses is None else uses  # how many waiting rows want a block

    @property
    def group(self) -> PrefillGroup | None:
        """The group in prefill."""
        return self._group

    @property
    def budget(self) -> Budget:
        """What may be spent now."""
        return self.memory.budget

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> Iterable[Sequence]:
        """The rows that wait, oldest first."""
        return self._waiting

    @property
    def is_idle(self) -> bool:
        return not self._waiting and self._group is None and not self.layouts.num_active

    def add(self, row: Sequence) -> None:
        self._waiting.append(row)
        self._uses.add(row.block_keys)

    def requeue(self, rows: Iterable[Sequence]) -> None:
        """Rows that were begun wait again, before all others, in this order."""
        found = list(rows)
        self._waiting.extendleft(reversed(found))
        for row in found:
            self._uses.add(row.block_keys)

    def abandon_group(self) -> list[Sequence]:
        """Forget the group in prefill; its rows that are still wanted."""
        group, self._group = self._group, None
        return group.wanted if group else []

    def ahead(self, rows: Iterable[Sequence]) -> int | None:
        """Tokens to reckon with for each row when these are admitted; None: all that may come."""
        is_sure = any(row.num_preempted >= MAX_PREEMPTIONS for row in rows)
        return self.answers.expected if self._is_optimistic and not is_sure else None

    def cancel(self, job_id: str) -> Sequence | None:
        """Forget a row that waits or is in prefill, and return it; None when it is neither."""
        for row in self._waiting:
            if row.job_id == job_id:
                self._waiting.remove(row)
                self._uses.remove(row.block_keys)
                row.end("canceled")
                return row
        for row in self._group.rows if self._group else ():
            if row.job_id == job_id:
                row.end("canceled")  # computed to its end with its neighbours, then left
                return row
        return None

    def is_in_prefill(self, row: Sequence) -> bool:
        """Whether the row is in the group in prefill, cancelled or not."""
        return self._group is not None and any(one is row for one in self._group.rows)

    def next_group(self) -> PrefillGroup | None:
        """The group to compute a chunk of now, or None: nothing waits, or nothing fits yet."""
        if self._group is not None and not self._group.wanted:
            self._group = None  # everybody in it was cancelled
        if self._group is None and self._waiting and self._is_worth_it():
            self._group = self._form_group()
        return self._group

    def _is_worth_it(self) -> bool:
        """Not for a sliver: a chunk costs a whole pass, so wait until a few slots are free.

        When nothing decodes there is nothing to wait for.
        """
        free, waiting = self.layouts.num_free, len(self._waiting)
        enough = max(1, self.layouts.num_slots // 16)
        return free >= min(enough, waiting) or not self.layouts.num_active

    def _form_group(self) -> PrefillGroup | None:
        """The row whose turn it is and those nearest to it in length that fit one chunk with it.

        A row that would compute the same next block as a row already chosen stays behind: it finds
        that block in the cache when the group is done.
        """
        window, cuts = self._alike()
        cached = window[0].num_cached if window else 0
        rows: list[Sequence] = []
        upcoming: set[bytes] = set()
        width = 0
        for row in window:
            block = _next_block(row)
            if block in upcoming:
                continue
            width = max(width, row.num_prefill - cached)
            fits_chunk = not rows or (len(rows) + 1) * width <= self.memory.budget.chunk_tokens
            room = len(rows) < self.layouts.num_free
            if not (room and fits_chunk and self._fits_memory([*rows, row], cuts)):
                break
            rows.append(row)
            if block is not None:
                upcoming.add(block)
        if not rows:
            return None
        chosen = set(map(id, rows))
        self._waiting = deque(row for row in self._waiting if id(row) not in chosen)
        for row in rows:
            row.start_prefill(self._stops(row) if self._state_blocks else frozenset())
            self._uses.remove(row.block_keys)
        return PrefillGroup(rows, cached, cuts)

    def _alike(self) -> tuple[list[Sequence], Cuts]:
        """Ready rows that may be computed with the one whose turn it is, of its length first.

        And the stems that all of them have in common.
        """
        window = [row for row in islice(self._waiting, LOOKAHEAD) if self._is_ready(row)]
        if not window:
            return [], ()
        window = longest_first(window, self.layouts.num_slots)
        for row in window:
            row.num_cached = self._num_cached(row)
        if window[0].parked:  # computed already: it only has to find room
            return window[:1], self._cuts_of_parked(window[0])
        cached, goal = window[0].num_cached, window[0].num_prefill
        cuts = self.stem_cuts(window[0], window[0].num_cached)
        stem_blocks = num_blocks(cuts)
        last = window[0].block_keys[:stem_blocks][-1:]
        window = [
            row
            for row in window
            if row.num_cached == cached
            and not row.parked
            and row.block_keys[:stem_blocks][-1:] == last
        ]
        if stem_blocks:  # a row needs a token of its own
            window = [row for row in window if row.num_prefill > stem_blocks * BLOCK_TOKENS]
        if not self._ragged:
            window = [row for row in window if row.num_prefill == goal]
        return sorted(window, key=lambda row: abs(row.num_prefill - goal)), cuts

    def stem_cuts(self, row: Sequence, num_cached: int, behind: PrefixPart | None = None) -> Cuts:
        """Of a row's cached tokens, what to share with others: where each of its stems ends.

        Stems that are held, and the one that the row was computed ``behind``, stay as they are; new
        ones grow on them where they save most.
        """
        if not self._shares:
            return ()
        most = min(num_cached, row.num_prefill - 1) // BLOCK_TOKENS
        keys = row.block_keys[:most]
        held = self._cuts_held(keys, behind)
        wanted = [self._uses.remaining(key) for key in keys]
        return cuts_of(wanted, held, self._stem_costs)

    def _cuts_held(self, keys: list[bytes], behind: PrefixPart | None = None) -> Cuts:
        """The deepest stem that is held of a chain of blocks, and those that it stands on."""
        held = self.layouts.stems_with(behind)
        last = next((held[key] for key in reversed(keys) if key in held), None)
        return tuple(stem.num_tokens // BLOCK_TOKENS for stem in last.chain) if last else ()

    def _cuts_of_parked(self, row: Sequence) -> Cuts:
        """A row comes back behind as many tokens as it left."""
        depth = row.num_shared // BLOCK_TOKENS
        held = self._cuts_held(row.block_keys[:depth])
        return held if depth in (0, *held) else (*held, depth)

    def _stops(self, row: Sequence) -> frozenset[int]:
        """Where the row's states are worth keeping: where others part from it, and at its end.

        Others wait here, or the producer knows of them. All at the ends of full blocks; states of
        every block would be gigabytes.
        """
        wanted = [self._uses.remaining(key) for key in row.block_keys[: self._state_blocks]]
        stops = {
            number * BLOCK_TOKENS
            for number, (count, after) in enumerate(pairwise(wanted), start=1)
            if count > after or number % STATE_INTERVAL == 0
        }
        stops.add(len(wanted) * BLOCK_TOKENS)
        stops.add(min(row.num_common_blocks, len(wanted)) * BLOCK_TOKENS)
        return frozenset(stop for stop in stops if stop > row.num_cached)

    def _fits_memory(self, rows: list[Sequence], cuts: Cuts) -> bool:
        """Whether these rows may be admitted together; a row that is alone always may."""
        group = PrefillGroup(rows, stem_cuts=cuts)
        if self.memory.fits(group.demands, self.ahead(rows), group.stem_keys):
            return True
        if len(rows) > 1 or self.layouts.num_active:
            return False
        self._drop_buffers()  # alone it fits, add() saw to it, if nothing old stays beside it
        return True

    def finish_group(self) -> list[Sequence]:
        """The rows of the computed group that are still wanted."""
        group, self._group = self._group, None
        assert group is not None and group.is_computed
        return group.wanted


def _next_block(row: Sequence) -> bytes | None:
    """Key of the first block that the row has to compute, if it is a full one."""
    number = row.num_cached // BLOCK_TOKENS
    return row.block_keys[number] if number < len(row.block_keys) else None
