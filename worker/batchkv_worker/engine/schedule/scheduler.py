"""Chooses what to compute next. It knows rows and memory, no tensors, and is tested without MLX."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import islice, pairwise, takewhile

from batchkv_cache_store.keys import BLOCK_TOKENS
from batchkv_cache_store.uses import Uses
from batchkv_worker.engine.schedule import common_tokens
from batchkv_worker.engine.schedule.admission import Budget, OutputLengths
from batchkv_worker.engine.schedule.common_tokens import Leaders, start_together
from batchkv_worker.engine.schedule.memory import Memory
from batchkv_worker.engine.schedule.policy import (
    as_many_as_fit,
    free_slots,
    in_turn,
    most_alike,
    next_row,
    steps_left,
)
from batchkv_worker.engine.schedule.prefill_group import PrefillGroup
from batchkv_worker.engine.schedule.prefix_split import (
    PrefixCosts,
    SplitPoints,
    choose_split_points,
    key_at,
    keys_of,
    num_shared,
    unit_of,
)
from batchkv_worker.kv.attention.prefix_part import PrefixPart
from batchkv_worker.kv.slots.layouts import SlotLayouts
from batchkv_worker.sequence import Sequence

__all__ = ["Budget", "PrefillGroup", "Scheduler"]

LOOKAHEAD = 256  # waiting rows among which a group of similar length is chosen
STATE_INTERVAL = 16  # blocks after which a state is kept wherever prompts differ
MAX_PREEMPTIONS = 2  # then a row is admitted by its worst case, and is not preempted any more


class Scheduler:
    """The rows that wait, the group in prefill, and the choice of the next group."""

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
        prefix_costs: PrefixCosts | None = None,
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
        self._shares = shares  # whether rows may share prefixes
        self._prefix_costs = prefix_costs or PrefixCosts()
        self._state_blocks = state_blocks  # blocks after which states are worth keeping, at most
        self._is_optimistic = is_optimistic
        self._is_held = False  # the machine is short of memory
        self.output_lengths = OutputLengths()
        self._group: PrefillGroup | None = None
        self._aside: PrefillGroup | None = None  # a group that waits for live rows to be computed
        self._lane_chunk = 0  # tokens of a chunk while live rows come; 0: none have come lately
        self._too_few = (0, 0, False)  # slots, rows, is_decoding: where it was not worth a chunk
        self._is_short = False  # the first live row has a slot, and does not fit the memory
        self._waiting: deque[Sequence] = deque()
        # How many waiting rows have a block, and how many begin with a partial block.
        self._uses = Uses() if uses is None else uses

    @property
    def group(self) -> PrefillGroup | None:
        """The group in prefill."""
        return self._group

    @property
    def aside(self) -> PrefillGroup | None:
        """A group in prefill that waits until live rows are computed."""
        return self._aside

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk of rows of batches now."""
        whole = self.memory.budget.chunk_tokens
        return min(whole, self._lane_chunk) if self._lane_chunk else whole

    def use_lane(self, chunk_tokens: int) -> None:
        """While live rows come, cut chunks to so many tokens and keep a slot free; 0: do not."""
        self._lane_chunk = chunk_tokens

    @property
    def needs_way(self) -> bool:
        """Whether a live row waits that has no slot or no memory, and need not wait for others."""
        waiting = self._waiting
        if not waiting or not waiting[0].is_live or not self._is_ready(waiting[0]):
            return False
        if not self._may_start() or (self._group is not None and self._group.is_live):
            return False
        num_promised = sum(not row.is_live for row in self._in_prefill())
        return self._is_short or self.layouts.num_free <= num_promised

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
        is_computing = self._group is not None or self._aside is not None
        return not self._waiting and not is_computing and not self.layouts.num_active

    def hold(self, is_held: bool) -> None:
        """While held, no group starts while rows decode, and the budget does not grow."""
        self._is_held = is_held

    def note_completed(self, num_tokens: int) -> None:
        """A row with an output of so many tokens has ended well."""
        self.output_lengths.add(num_tokens)
        if not self._is_held:
            self.memory.relax()

    def add(self, row: Sequence) -> None:
        if row.is_live:
            self._waiting.insert(self._num_live(), row)
        else:
            self._waiting.append(row)
        self._count(row)

    def _count(self, row: Sequence) -> None:
        """It waits for its blocks."""
        self._uses.add(row.block_keys)
        self._uses.add(row.partial_keys)

    def _discount(self, row: Sequence) -> None:
        """It waits no more."""
        self._uses.remove(row.block_keys)
        self._uses.remove(row.partial_keys)

    def _num_live(self) -> int:
        """How many live rows wait. They come before all others."""
        return sum(1 for _ in takewhile(lambda row: row.is_live, self._waiting))

    def requeue(self, rows: Iterable[Sequence]) -> None:
        """Put preempted rows before all others, in this order, but after live rows."""
        found = sorted(rows, key=lambda row: not row.is_live)
        live = [self._waiting.popleft() for _ in range(self._num_live())]
        self._waiting.extendleft(reversed(sorted([*found, *live], key=lambda row: not row.is_live)))
        for row in found:
            self._count(row)

    def add_choices(self, rows: list[Sequence]) -> None:
        """Queue the other choices of a row whose prompt is computed, before rows not begun yet.

        So the choices of one row end soon after each other, and few rows are open at one time.
        """
        begun = list(takewhile(lambda row: row.is_begun or row.is_live, self._waiting))
        rest = islice(self._waiting, len(begun), None)
        self._waiting = deque((*begun, *rows, *rest))
        for row in rows:
            self._count(row)

    def abandon_group(self) -> list[Sequence]:
        """Forget what is in prefill. Returns its rows that were not cancelled."""
        groups, self._group, self._aside = (self._group, self._aside), None, None
        self.memory.set_aside(None)
        return [row for group in groups if group for row in group.wanted]

    def ahead(self, rows: Iterable[Sequence]) -> int | None:
        """How many future tokens to count for each row at admission; None: all of them."""
        is_sure = any(row.num_preempted >= MAX_PREEMPTIONS for row in rows)
        return self.output_lengths.expected if self._is_optimistic and not is_sure else None

    def cancel(self, job_id: str) -> Sequence | None:
        """End a row that waits or is in prefill, and return it; None when it is neither."""
        for row in self._waiting:
            if row.job_id == job_id:
                self._waiting.remove(row)
                self._discount(row)
                row.end("canceled")
                return row
        for row in self._in_prefill():
            if row.job_id == job_id:
                row.end("canceled")  # its prompt is computed with the others, then dropped
                return row
        return None

    def is_in_prefill(self, row: Sequence) -> bool:
        """Whether the row is in the group in prefill, cancelled or not."""
        return any(one is row for one in self._in_prefill())

    def _in_prefill(self) -> Iterable[Sequence]:
        groups = (group for group in (self._group, self._aside) if group is not None)
        return (row for group in groups for row in group.rows)

    def next_group(self, *, is_decoding: bool = True) -> PrefillGroup | None:
        """The group whose next chunk is computed now; None when no row waits or none fits.

        ``is_decoding``: rows in slots decode. Otherwise they came in just now.
        """
        if self._group is not None and not self._group.wanted:
            self._group = None  # all its rows were cancelled
        if self._waiting and self._waiting[0].is_live:
            self._set_aside()
        if self._group is None and self._aside is not None:
            first = self._waiting[0] if self._waiting else None
            can_begin = first is not None and first.is_live and self._can_begin(first)
            live = self._form_group() if can_begin else None
            self._group, self._aside = (live, self._aside) if live else (self._aside, None)
            self.memory.set_aside(self._aside)
        may_form = self._group is None and self._waiting and self._may_start()
        if may_form and self._is_worth_it(is_decoding=is_decoding):
            self._group = self._form_group()
        return self._group

    def _set_aside(self) -> None:
        """A live row does not wait for prompts of batches: they go on after its own."""
        group = self._group
        is_of_batch = group is not None and not group.is_live and not group.is_computed
        if is_of_batch and self._aside is None and self._can_begin(self._waiting[0]):
            self._group, self._aside = None, group
            self.memory.set_aside(group)

    def _can_begin(self, row: Sequence) -> bool:
        return self.layouts.num_free > 0 and self._may_start() and self._is_ready(row)

    def _may_start(self) -> bool:
        """Whether memory allows a group to start; when no row decodes, one always may."""
        return not self._is_held or not self.layouts.num_active

    def _is_worth_it(self, *, is_decoding: bool) -> bool:
        """Whether enough slots are free: a chunk costs a whole pass, however few its rows."""
        free, waiting = self.layouts.num_free, len(self._waiting)
        if self._waiting[0].is_live and free:
            return True
        free -= self._num_kept()
        if not self.layouts.num_active or 0 < waiting <= free:  # then any number is enough
            return True
        if free < 1 or self._too_few == (free, waiting, is_decoding):  # as at the last step
            return False
        window = [row for row in islice(self._waiting, LOOKAHEAD) if self._is_ready(row)]
        if not window:
            return False
        row = next_row(window, self._steps_left(window))
        rows_in_chunk = self.chunk_tokens // max(1, row.num_prefill - self._num_cached(row))
        answer = self.output_lengths.mean or self._waiting[0].num_remaining
        costs = self.layouts.num_slots, self.budget.chunk_steps, answer, rows_in_chunk
        enough = free_slots(*costs, is_decoding=is_decoding)
        self._too_few = (free, waiting, is_decoding) if free < enough else (0, 0, False)
        return free >= enough

    def _steps_left(self, waiting: list[Sequence]) -> float:
        return steps_left(waiting, self.layouts.main.num_remaining, self.layouts.num_slots)

    def _form_group(self) -> PrefillGroup | None:
        """The row that is next, and the rows of similar length that fit one chunk with it.

        Rows that have their next tokens in common with a chosen row wait for it (``Leaders``).
        """
        window, points, is_apart = self._alike()
        is_live = bool(window) and window[0].is_live
        free = self.layouts.num_free - (0 if is_live else self._num_kept())
        chunk = self.memory.budget.chunk_tokens if is_live else self.chunk_tokens
        window = start_together(window, free, chunk) if window else []
        cached = window[0].num_cached if window else 0
        leaders = Leaders(free, chunk, self._uses.remaining)
        rows = as_many_as_fit(
            leaders.choose(window, cached), lambda some: self._fits_memory(some, points)
        )
        self._is_short = is_live and not rows
        if not rows:
            return None
        if is_apart and len({key_at(row, cached) for row in rows}) == 1:
            is_apart, points = False, self.split_points(rows[0], cached)
        chosen = set(map(id, rows))
        looked_at = [self._waiting.popleft() for _ in range(min(LOOKAHEAD, self.num_waiting))]
        self._waiting.extendleft(row for row in reversed(looked_at) if id(row) not in chosen)
        for row in rows:
            row.start_prefill(self._stops(row) if self._state_blocks else frozenset())
            self._discount(row)
        return PrefillGroup(rows, cached, points, is_apart=is_apart)

    def _num_kept(self) -> int:
        """Slots that rows of batches do not get: one for the next live row while any come."""
        return 1 if self._lane_chunk and self.layouts.num_slots > 1 else 0

    def _alike(self) -> tuple[list[Sequence], SplitPoints, bool]:
        """Ready rows that may be computed with the next one, those of similar length first.

        Also the split points of the prefix that all share, and whether each is behind its own.
        """
        window = [row for row in islice(self._waiting, LOOKAHEAD) if self._is_ready(row)]
        if not window:
            return [], (), False
        live = [row for row in window if row.is_live]
        left = self._steps_left(window)
        window = live or in_turn(window, left)
        for row in window:
            row.num_cached = self._num_cached(row)
        if parked := window[0].parked:  # computed already: it only needs a slot
            alike = [row for row in window if row.parked == parked]  # choices of one row
            return alike, self._points_of_parked(window[0]), False
        points = self.split_points(window[0], window[0].num_cached)
        shared = num_shared(points)
        last = key_at(window[0], shared)
        window = common_tokens.with_the_first(window, shared, is_ragged=self._ragged)
        same = [row for row in window if key_at(row, shared) == last]
        limits = self.chunk_tokens, self.layouts.num_free, self._prefix_costs.joined
        start, others = common_tokens.behind_others(same, window, self.split_points, *limits)
        if others and self._fits_memory(others, ()):
            return most_alike(common_tokens.all_after(start, others), left), (), True
        return most_alike(same, left), points, False

    def split_points(
        self,
        row: Sequence,
        num_cached: int,
        computed_after: PrefixPart | None = None,
        beside: Mapping[bytes, int] | None = None,
    ) -> SplitPoints:
        """Where the shared prefixes within a row's cached tokens end.

        Those in use do not change. Neither does ``computed_after``, the prefix that the row was
        computed with. New ones are added where they save most. ``beside``: rows that do not wait.
        """
        if not self._shares:
            return ()
        keys = keys_of(row, min(num_cached, row.num_prefill - 1))
        held = self._held_points(keys, computed_after)
        # The other choices of a row are queued once its prompt is computed.
        more = beside or {}
        wanted = [self._uses.remaining(k) + len(row.unqueued) + more.get(k, 0) for k in keys]
        return choose_split_points(wanted, unit_of(row), held, self._prefix_costs)

    def _held_points(
        self, keys: list[bytes], computed_after: PrefixPart | None = None
    ) -> SplitPoints:
        """Where the longest chain of shared prefixes in use ends that has one of these keys."""
        held = self.layouts.prefixes_with(computed_after)
        last = next((held[key] for key in reversed(keys) if key in held), None)
        return tuple(one.num_tokens for one in last.chain) if last else ()

    def _points_of_parked(self, row: Sequence) -> SplitPoints:
        """Split points of a parked row: it shares as many tokens as when it left its slot."""
        depth = row.num_shared
        held = self._held_points(keys_of(row, depth))
        return held if depth in (0, *held) else (*held, depth)

    def _stops(self, row: Sequence) -> frozenset[int]:
        """Tokens after which the row's states are kept: where other rows differ, and at its end.

        The other rows wait here, or the job states how many bytes of text they share. States are
        kept at ends of full blocks only, because those of every block would take gigabytes.
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

    def _fits_memory(self, rows: list[Sequence], points: SplitPoints) -> bool:
        """Whether these rows may be admitted together; a row that is alone always may."""
        group = PrefillGroup(rows, split_points=points)
        if self.memory.fits(group.demands, self.ahead(rows), group.shared_keys):
            return True
        if len(rows) > 1 or self.layouts.num_active:
            return False
        self._drop_buffers()  # then it fits: the engine has refused rows that never fit
        return True

    def finish_group(self) -> list[Sequence]:
        """End the computed group. Returns its rows that were not cancelled."""
        group, self._group = self._group, None
        assert group is not None and group.is_computed
        return group.wanted
