"""The rows that decode, by slot: how they come in, and how they leave before their end.

What the slots allocate is held to the budget here. When the next step would take more, first the
rows are brought together; then the rows that cost least to lose leave: they wait again, before all
others, and go on token for token. What their slots held is put into the prefix memory, bit for bit,
and copied back when there is room; should it have had to go, what the row has generated is computed
like more of its prompt. A row that has left
``MAX_PREEMPTIONS`` times comes back when its worst case fits, and then stays; so every row ends.
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
from batchkv_worker.engine.schedule.prefix_split import num_blocks
from batchkv_worker.engine.schedule.scheduler import MAX_PREEMPTIONS, Scheduler
from batchkv_worker.engine.shared_prefixes import Stems
from batchkv_worker.engine.slot_insert import Placed, runs
from batchkv_worker.kv.attention.shared_prefix import SharedPrefix
from batchkv_worker.kv.layers.decode import DecodeSlots
from batchkv_worker.kv.slots.changes import Move
from batchkv_worker.kv.slots.growth import NoRoom
from batchkv_worker.prefix.memory import PrefixCache
from batchkv_worker.sequence import Sequence

_parked = count(1)
log = logging.getLogger("batchkv.engine")


class SlotRows:
    """Rows in slots; ``by_slot`` is where each is, ``num_preempted`` how often one had to leave."""

    def __init__(
        self,
        slots: DecodeSlots,
        scheduler: Scheduler,
        prefixes: PrefixCache,
        prefill: Prefill,
        stems: Stems,
    ) -> None:
        self._slots = slots
        self.scheduler = scheduler
        self._prefixes = prefixes
        self._prefill = prefill
        self._stems = stems
        self.by_slot: dict[int, Sequence] = {}
        self.num_preempted = 0
        self._between: list[Sequence] = []  # rows that are just coming in or leaving

    # -- coming in

    def join(self, group: PrefillGroup, flying: Step | None = None) -> None:
        """Rows whose prompts are computed move in; those that find no room wait again.

        ``flying`` is the step in flight: buffers that it still reads would be copied.
        """
        if flying is not None:
            mx.eval(flying.sampled.arrays)
        rows = self._between = self.scheduler.finish_group()
        placed: list[Placed] = []
        for row in rows:
            one = self._place(group, row)
            if one is None:
                break
            placed.append(one)
        for first, *others in runs(placed):
            pieces = self._prefill.pieces(group, first.row, first.shared, 1 + len(others))
            self._slots.fill(first.slot, pieces)
        self._slots.settle()
        for one in placed:
            self._prefixes.forget(one.row.parked)
            one.row.unpark()
        self._prefill.drop()
        self._wait_again(rows[len(placed) :])

    def _place(self, group: PrefillGroup, row: Sequence) -> Placed | None:
        """Give a row a slot; None when there is no room."""
        stem = self._leaders_stem(row, group)
        one = Placed(row, group.rows.index(row), stem.num_tokens if stem else 0)
        max_cells = self.scheduler.memory.max_cells(group, one.demand, stem)
        try:
            slot, move = self._slots.place(one.demand, stem, max_cells)
        except NoRoom as short:
            self._follow(short.move)
            return None
        self._follow(move)
        row.enter_slot(slot)
        self.by_slot[slot] = row
        return one

    def _leaders_stem(self, row: Sequence, group: PrefillGroup) -> SharedPrefix | None:
        """A longer stem for a row that has computed what others wait for, if there is room for one.

        Else its long line in the slots would make those of all its followers as long. Without one
        it keeps the group's; a row that comes back has its tokens as it left.
        """
        stem = self._prefill.stem
        cuts = self.scheduler.stem_cuts(row, row.num_prefill, stem)
        keys = row.block_keys[: num_blocks(cuts)]
        num_tokens = len(keys) * BLOCK_TOKENS
        if row.parked or num_tokens <= (stem.num_tokens if stem else 0):
            return stem
        if not self.scheduler.memory.fits_stem(keys, stem, group):
            return stem
        return self._stems.of(keys, cuts, stem) or stem

    def _follow(self, move: Move | None) -> None:
        """A row went to another slot."""
        if move is not None:
            row = self.by_slot.pop(move.source)
            row.move_to(move.target)
            self.by_slot[move.target] = row

    # -- leaving

    def free(self, row: Sequence) -> None:
        """The row's way back: its slot, wherever it ends."""
        if row.slot is not None:
            self._slots.release(row.slot)
            del self.by_slot[row.slot]
            row.leave_slot()

    def close_gaps(self) -> None:
        """With nobody waiting, keep the rows dense, so that steps compute few free slots.

        A move copies a row, so it waits until a quarter of the rows are free.
        """
        main = self._slots.layouts.main
        if main.num_active > 0.75 * main.num_rows:
            return
        while (move := self._slots.close_gap()) is not None:
            self._follow(move)

    def extend_keys(self, rows: list[Sequence]) -> None:
        """Give rows the keys of blocks of what they have generated, too.

        A replay has none: it uses no cached block.
        """
        for row in rows:
            tokens = row.prompt + row.generated
            row.resume_after([] if row.replay_of else self._prefixes.keys(tokens))

    def lose_all(self) -> list[Sequence]:
        """The buffers are gone; the rows that were in them, or on their way."""
        found = {id(row): row for row in (*self._between, *self.by_slot.values())}
        self._between = []
        for slot in self._slots.layouts.main.slots:
            self._slots.release(slot)
        self.by_slot.clear()
        for row in found.values():
            row.leave_slot()
        self._slots.drop()
        return list(found.values())

    # -- room for the next step

    def make_room(self, land: Callable[[], bool]) -> None:
        """Make sure that the next step has its columns; rows leave if there is no other way.

        ``land`` reads back the step in flight, and says whether there was one.
        """
        main, scheduler = self._slots.layouts.main, self.scheduler
        while self.by_slot and main.write == main.capacity:
            try:
                self._slots.make_room(scheduler.memory.max_cells(scheduler.group))
                return
            except NoRoom:
                pass
            if land():
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

    def _cheapest(self) -> list[Sequence]:
        """Rows that make room by leaving: those that lose least, or the longest, if that is less.

        Rows that may leave no more are left in peace as long as there are others; one row stays.
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
        """Tokens that are computed again when the row comes back, and tokens that are copied."""
        total = len(row.prompt) + len(row.generated) - 1
        if row.slot is not None and self._prefixes.can_park(self._slots.row_bytes(row.slot)):
            return 0, total
        return total - min(total, len(row.block_keys) * BLOCK_TOKENS), 0

    def _enough(self, order: list[Sequence]) -> list[Sequence]:
        """The first rows of ``order`` without which the others have room; all, if need be."""
        left = list(self.by_slot.values())
        for place, row in enumerate(order, start=1):
            left.remove(row)
            slots = [other.slot for other in left if other.slot is not None]
            remaining = max((other.num_remaining for other in left), default=0)
            memory, group = self.scheduler.memory, self.scheduler.group
            if memory.fits_without_others(slots, remaining, group):
                return order[:place]
        return order

    def _preempt(self, rows: list[Sequence]) -> None:
        log.info(
            "%d of %d rows leave their slots for a while: %d bytes for keys and values are taken",
            *(len(rows), len(self.by_slot), self.scheduler.budget.memory_bytes),
        )
        self.num_preempted += len(rows)
        self._between = rows
        for row in rows:
            assert row.slot is not None and row.num_dispatched == len(row.generated)
            num_bytes = self._slots.row_bytes(row.slot)
            stem = self._slots.layouts.stems.get(row.slot)
            self.extend_keys([row])
            if self._prefixes.can_park(num_bytes):
                row.park(f"row {next(_parked)}".encode(), stem.num_tokens if stem else 0)
                self._prefixes.park(row.parked, num_bytes, partial(self._slots.snapshot, row.slot))
            self.free(row)
        self._wait_again(rows)

    def _wait_again(self, rows: list[Sequence]) -> None:
        for row in rows:
            row.preempt()
        self.scheduler.requeue(rows)
        self._between = []
