"""The rows that decode, by slot: how they are inserted, and how they are preempted.

The slots never take more than the budget. When the next step would, free slots are closed first.
Then the rows that cost least to lose are preempted. They wait again, before all others, and go on
after the tokens that were read. The content of their slots is parked in the prefix memory, bit for
bit, and copied back when there is room. If it was evicted, the generated tokens are computed like
more of the prompt. A row that was preempted ``MAX_PREEMPTIONS`` times comes back when its worst
case fits, and then stays. So every row ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from itertools import count

import mlx.core as mx

from batchkv_cache_store.keys import BLOCK_TOKENS
from batchkv_worker.engine.decode_step import Step
from batchkv_worker.engine.prefill import Prefill
from batchkv_worker.engine.schedule.prefill_group import PrefillGroup
from batchkv_worker.engine.schedule.prefix_split import keys_of, num_shared
from batchkv_worker.engine.schedule.scheduler import MAX_PREEMPTIONS, Scheduler
from batchkv_worker.engine.shared_prefixes import SharedPrefixBuilder
from batchkv_worker.engine.slot_insert import Placement
from batchkv_worker.kv.attention.shared_prefix import SharedPrefix
from batchkv_worker.kv.layers.decode import DecodeSlots
from batchkv_worker.kv.slots.changes import Move
from batchkv_worker.kv.slots.growth import NoRoom
from batchkv_worker.prefix.memory import PrefixCache
from batchkv_worker.sequence import Sequence

LEAST_CLOSED = 0.75  # of the rows that a step computes, which are left when gaps are closed
STEPS_LEFT = 16  # for each step that a chunk costs: so many must come for gaps to be closed
_parked = count(1)
log = logging.getLogger("batchkv.engine")


class DecodeRows:
    """Rows in slots. ``by_slot`` has the row of each slot; ``num_preempted`` counts preemptions."""

    def __init__(
        self,
        slots: DecodeSlots,
        scheduler: Scheduler,
        prefixes: PrefixCache,
        prefill: Prefill,
        builder: SharedPrefixBuilder,
    ) -> None:
        self._slots = slots
        self.scheduler = scheduler
        self._prefixes = prefixes
        self._prefill = prefill
        self._builder = builder
        self.by_slot: dict[int, Sequence] = {}
        self.num_preempted = 0
        self._in_transit: list[Sequence] = []  # rows that are being inserted or preempted

    # -- inserting

    def insert(self, group: PrefillGroup, in_flight: Step | None = None) -> bool:
        """Copy a computed group's rows into slots; rows without room wait again.

        Returns whether all had room.
        The step in flight is waited for: MLX would copy the buffers that it still reads.
        """
        if in_flight is not None:
            mx.eval(in_flight.sampled.arrays)
        rows = self._in_transit = self.scheduler.finish_group()
        placed: list[Placement] = []
        for row in rows:
            one = self._place(group, row)
            if one is None:
                break
            placed.append(one)
        self._prefill.fill(self._slots, [one.arrival for one in placed])
        # The rows of a chunk hold little until the next step, which is built meanwhile.
        self._slots.settle(waits=group.width > self.scheduler.budget.chunk_tokens)
        parked = {one.row.parked for one in placed}
        for one in placed:
            one.row.unpark()
        self._prefill.drop()
        self._wait_again(rows[len(placed) :])
        for key in parked.difference(row.parked for row in self.scheduler.waiting):
            self._prefixes.forget(key)
        for one in placed:
            self._queue_choices(one.row)
        return len(placed) == len(rows)

    def _queue_choices(self, row: Sequence) -> None:
        """Queue the other choices of a row whose first one has entered its slot.

        They need no computing: what the slot has now is parked for all of them.
        """
        if not (others := row.queue_choices()):
            return
        self.scheduler.add_choices(others)
        if row.num_prefill:
            self._park(row, others)

    def _place(self, group: PrefillGroup, row: Sequence) -> Placement | None:
        """Give a row a slot; None when there is no room."""
        if not self.scheduler.layouts.num_free:  # a live row has taken it
            return None
        shared = self._leaders_prefix(row, group)
        one = Placement(row, group.rows.index(row), shared.num_tokens if shared else 0)
        max_cells = self.scheduler.memory.max_cells(group, one.demand, shared)
        try:
            slot, move = self._slots.place(one.demand, shared, max_cells)
        except NoRoom as short:
            self._follow(short.move)
            return None
        self._follow(move)
        row.enter_slot(slot)
        self.by_slot[slot] = row
        return one

    def _leaders_prefix(self, row: Sequence, group: PrefillGroup) -> SharedPrefix | None:
        """The shared prefix of a row: a longer one than the group's, if others wait for its tokens.

        Otherwise its many own columns would make those of all rows that follow it as long. There
        must be room for a longer one. A parked row keeps the group's.
        """
        shared, layouts = self._prefill.shared_prefix, self._slots.layouts
        # What others wait for is stored, unless they came too late or the memory is full.
        held = layouts.tokens_held(keys_of(row, row.num_prefill), shared)
        held = max(held, self._prefixes.num_held(row))
        points = self.scheduler.split_points(row, held, shared, group.beside(row))
        num_tokens = num_shared(points)
        if row.parked or num_tokens <= (shared.num_tokens if shared else 0):
            return shared
        keys = keys_of(row, num_tokens)
        if not self.scheduler.memory.fits_shared_prefix(num_tokens, keys, shared, group):
            return shared
        return self._builder.build(row, points, shared) or shared

    def _follow(self, move: Move | None) -> None:
        """Note that a row was moved to another slot."""
        if move is not None:
            row = self.by_slot.pop(move.source)
            row.move_to(move.target)
            self.by_slot[move.target] = row

    # -- leaving

    def free(self, row: Sequence) -> None:
        """Release the row's slot, if it has one."""
        if row.slot is not None:
            self._slots.release(row.slot)
            del self.by_slot[row.slot]
            row.leave_slot()

    def close_gaps(self) -> None:
        """Move rows into free slots below them, so that steps compute few free slots.

        For when no row waits. It copies rows and waits for the step in flight, so a step must then
        compute a quarter fewer rows. Rows that are below this number of slots already stay. Where
        the host is what takes time, fewer rows save little, and moving them costs as much as
        several steps: then some row must have many steps left.
        """
        main, chunk_steps = self._slots.layouts.main, self.scheduler.budget.chunk_steps
        if main.last_end - main.write < STEPS_LEFT * chunk_steps:
            return
        now = self._slots.rows_of_step()
        then = self._slots.rows_of_step(self._slots.layouts.num_active)
        if then <= LEAST_CLOSED * now:
            for move in self._slots.close_gaps(then):
                self._follow(move)

    def extend_keys(self, rows: list[Sequence]) -> None:
        """Give rows the keys of blocks and partial blocks of what they have generated, too.

        A replay has none: it uses no cached block.
        """
        for row in rows:
            if row.replay_of:
                row.resume_after([], [])
                continue
            tokens, salt, prefixes = row.prompt + row.generated, row.cache_salt, self._prefixes
            row.resume_after(prefixes.keys(tokens, salt), prefixes.partial_keys(tokens, salt))

    def lose_all(self) -> list[Sequence]:
        """Drop all buffers, which are lost. Returns the rows that were in them or in transit."""
        found = {id(row): row for row in (*self._in_transit, *self.by_slot.values())}
        self._in_transit = []
        for slot in self._slots.layouts.main.slots:
            self._slots.release(slot)
        self.by_slot.clear()
        for row in found.values():
            row.leave_slot()
        self._slots.drop()
        return list(found.values())

    # -- room for the next step

    def make_room(self, read_back: Callable[[], bool]) -> None:
        """Make sure that the next step has its columns; preempt rows if there is no other way.

        ``read_back`` reads the step in flight, and returns whether there was one.
        """
        main, scheduler = self._slots.layouts.main, self.scheduler
        while self.by_slot and main.write == main.capacity:
            try:
                self._slots.make_room(scheduler.memory.max_cells(scheduler.group))
                return
            except NoRoom:
                pass
            if read_back():
                continue  # rows may have ended
            if main.rows > main.num_active:
                for move in self._slots.shrink():
                    self._follow(move)
                continue
            leaving = self._cheapest()
            if not leaving:
                self._slots.make_room(None)  # one row alone: more than its worst case it never has
                return
            self._preempt(leaving)

    def give_way(self, read_back: Callable[[], bool]) -> None:
        """A live row needs a slot or memory: a row of a batch leaves its slot for a while."""
        if all(row.is_live for row in self.by_slot.values()):
            return
        read_back()
        rows = [row for row in self.by_slot.values() if not row.is_live]
        if rows and self.scheduler.needs_way:  # no row has ended meanwhile
            leaving = min(rows, key=lambda row: (row.num_preempted, self._loss(row)))
            self._preempt([leaving], is_for_live=True)

    def shed(self) -> int:
        """Preempt rows until the others fit the budget, and give their memory back.

        No step may be in flight. What the rows held is dropped, not parked. One row stays. Returns
        how many have left.
        """
        if not self.by_slot:
            self._slots.drop()
            return 0
        leaving = [] if self._fits([*self.by_slot.values()]) else self._cheapest()
        if leaving:
            self._preempt(leaving, parks=False)
        for move in self._slots.shrink(is_tight=True):
            self._follow(move)
        return len(leaving)

    def _fits(self, rows: list[Sequence]) -> bool:
        """Whether these rows have room for some steps when all others have left."""
        slots = [row.slot for row in rows if row.slot is not None]
        remaining = max((row.num_remaining for row in rows), default=0)
        memory, group = self.scheduler.memory, self.scheduler.group
        return memory.fits_without_others(slots, remaining, group)

    def _cheapest(self) -> list[Sequence]:
        """Rows to preempt: those that lose least, or the longest, if these lose less together.

        Rows that were preempted MAX_PREEMPTIONS times come last. One row always stays.
        """
        rows = sorted(self.by_slot.values(), key=lambda row: len(row.generated))
        loose = [row for row in rows[:-1] if row.num_preempted < MAX_PREEMPTIONS] or rows[:-1]
        length = self._slots.layouts.main.length
        orders = (
            sorted(loose, key=self._loss),
            sorted(loose, key=lambda row: -length(row.slot or 0)),
        )
        found = [self._enough(order) for order in orders]
        return min(found, key=lambda rows: [*map(sum, zip(*map(self._loss, rows), strict=True))])

    def _loss(self, row: Sequence) -> tuple[int, int]:
        """What preempting a row costs: tokens to compute again, and tokens to copy."""
        total = len(row.prompt) + len(row.generated) - 1
        if row.slot is not None and self._prefixes.can_park(self._slots.row_bytes(row.slot)):
            return 0, total
        return total - min(total, len(row.block_keys) * BLOCK_TOKENS), 0

    def _enough(self, order: list[Sequence]) -> list[Sequence]:
        """The fewest first rows of ``order`` that must leave for the others to have room."""
        left = list(self.by_slot.values())
        for place, row in enumerate(order, start=1):
            left.remove(row)
            if self._fits(left):
                return order[:place]
        return order

    def _preempt(
        self, rows: list[Sequence], *, parks: bool = True, is_for_live: bool = False
    ) -> None:
        taken = f"{self.scheduler.budget.memory_bytes} bytes for keys and values are taken"
        log.info(
            "%d of %d rows leave their slots for a while: %s",
            *(len(rows), len(self.by_slot)),
            "somebody waits for an answer" if is_for_live else taken,
        )
        self.num_preempted += len(rows)
        self._in_transit = rows
        for row in rows:
            assert row.slot is not None and row.num_dispatched == len(row.generated)
            self.extend_keys([row])
            if parks:
                self._park(row, [row])
            self.free(row)
        self._wait_again(rows)

    def _park(self, row: Sequence, waiting: list[Sequence]) -> None:
        """Store what a row's slot has now for those that go on from there, if there is room."""
        assert row.slot is not None
        num_bytes = self._slots.row_bytes(row.slot)
        if not self._prefixes.can_park(num_bytes):
            return
        shared = self._slots.layouts.prefixes.get(row.slot)
        key = f"row {next(_parked)}".encode()
        self._prefixes.park(key, num_bytes, partial(self._slots.snapshot, row.slot))
        for one in waiting:
            one.park(key, shared.num_tokens if shared else 0)

    def _wait_again(self, rows: list[Sequence]) -> None:
        for row in rows:
            row.preempt()
        self.scheduler.requeue(rows)
        self._in_transit = []
