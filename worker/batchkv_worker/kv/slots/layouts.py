"""The layouts of a model's decode slots: one for whole histories, one for each sliding window.

They move in lockstep: a row has the same slot in all of them, and only its columns differ. Plain
Python, like the layouts themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile

from batchkv_worker.kv.attention.prefix_part import PrefixPart
from batchkv_worker.kv.slots.changes import Demand, Move, Relayout
from batchkv_worker.kv.slots.layout import SlotLayout
from batchkv_worker.kv.slots.prefix_pool import TOGETHER_TOKENS
from batchkv_worker.kv.slots.slot_choice import Ranks
from batchkv_worker.kv.types import Window

Changes = dict[Window, Relayout]


@dataclass(frozen=True, slots=True)
class Costs:
    """Bytes of a model's caches under a scheme.

    ``per_token``: of all layers that keep every token. ``per_window``: of the layers with a window,
    by window. ``per_row``: of what has no time axis. ``extra_per_shared``: what a token of a shared
    prefix takes beyond ``per_token``, where prefill reads another form than slots do. ``largest``:
    a token's share of ``per_token`` in the layer that has most; two copies of that layer exist
    while a buffer is rebuilt.
    """

    per_token: int
    per_window: dict[int, int] = field(default_factory=dict)
    per_row: int = 0
    extra_per_shared: int = 0
    largest: int = 0

    @property
    def per_prefix_token(self) -> int:
        """Bytes that a token takes in a shared prefix."""
        return self.per_token + self.extra_per_shared

    @property
    def per_new_token(self) -> int:
        """Bytes that a token takes while it is in every window."""
        return self.per_token + sum(self.per_window.values())

    def prefill(self, length: int, shared: int, margin: int) -> int:
        """Bytes of one row in prefill among rows of up to ``length`` tokens.

        ``shared`` of them are in a shared prefix; ``margin`` tokens are kept beyond a window.
        """
        windows = sum(
            size * min(length, window + margin) for window, size in self.per_window.items()
        )
        # Prefill reads a shared prefix in place only if it is most of the prompt.
        own = length - shared if 2 * shared >= length else length
        return own * (self.per_token + self.largest) + windows + self.per_row


class SlotLayouts:
    """Slots, and their columns in every layout."""

    def __init__(
        self, num_slots: int, windows: Iterable[int] = (), *, in_any_order: bool = False
    ) -> None:
        """``in_any_order``: attention reads each row by itself, but for those with long prefixes.

        Then rows of like length, or with a short prefix in common, need not be neighbours.
        """
        self._in_any_order = in_any_order
        self.main = SlotLayout(num_slots)
        self.all: dict[Window, SlotLayout] = {None: self.main}
        self.all.update({window: SlotLayout(num_slots, window) for window in sorted(set(windows))})
        self.prefixes: dict[int, PrefixPart] = {}  # by slot

    def of(self, windows: Iterable[Window]) -> list[SlotLayout]:
        """The layouts of layers with these windows, one for each layer."""
        return [self.all[window] for window in windows]

    @property
    def num_slots(self) -> int:
        return self.main.num_slots

    @property
    def num_active(self) -> int:
        return self.main.num_active

    @property
    def num_free(self) -> int:
        return self.main.num_free

    @property
    def all_prefixes(self) -> dict[bytes, PrefixPart]:
        """All shared prefixes in use, by key: those of rows, and their parents."""
        return {prefix.key: prefix for leaf in {*self.prefixes.values()} for prefix in leaf.chain}

    def prefixes_with(self, other: PrefixPart | None) -> dict[bytes, PrefixPart]:
        """The same, with ``other`` and its parents, which no row may have yet."""
        return self.all_prefixes | {prefix.key: prefix for prefix in (other.chain if other else ())}

    def tokens_held(self, keys: Iterable[bytes], other: PrefixPart | None = None) -> int:
        """How many tokens of a chain with these keys are in prefixes in use, or in ``other``."""
        held = self.prefixes_with(other)
        return max((held[key].num_tokens for key in keys if key in held), default=0)

    def bytes_of_new(
        self, costs: Costs, prefix: PrefixPart | None, other: PrefixPart | None = None
    ) -> int:
        """Bytes of the prefixes of a chain that neither a row has yet, nor ``other``."""
        held = self.prefixes_with(other)
        new = sum(one.num_own for one in (prefix.chain if prefix else ()) if one.key not in held)
        return new * costs.per_prefix_token

    def peak_bytes(
        self, costs: Costs, extra: list[Demand], ahead: int | None, prefix_keys: list[bytes]
    ) -> int:
        """The most that the slots hold with ``extra`` rows admitted: as they are, and grown.

        The arguments are those of ``bytes_needed``.
        """
        held = self.bytes_held(costs) + self.bytes_of_shared(costs, extra, prefix_keys)
        return max(self.bytes_needed(costs, extra, ahead, prefix_keys), held)

    def bytes_needed(
        self,
        costs: Costs,
        extra: list[Demand],
        ahead: int | None = None,
        prefix_keys: Iterable[bytes] = (),
    ) -> int:
        """Bytes that the slots would grow to with ``extra`` rows admitted, which share a prefix.

        ``prefix_keys`` are its keys: what is in use already does not count. ``ahead`` is how many
        tokens count for each row at most; None: all that may still come.
        """
        needed = self.main.cells_needed([demand.own for demand in extra], ahead) * costs.per_token
        needed += self._copied(costs, extra, ahead)
        return needed + self.bytes_of_shared(costs, extra, prefix_keys) + self._beside(costs, extra)

    def bytes_of_shared(
        self, costs: Costs, extra: list[Demand], prefix_keys: Iterable[bytes] = ()
    ) -> int:
        """Bytes of the prefix that ``extra`` rows share, less those of prefixes in use."""
        shared = max((demand.shared for demand in extra), default=0)
        shared -= min(shared, self.tokens_held(prefix_keys))
        return shared * costs.per_prefix_token

    def _copied(self, costs: Costs, extra: list[Demand], ahead: int | None) -> int:
        """Bytes of the largest layer as it will be: two copies exist while it is rebuilt."""
        return self.main.cells_needed([demand.own for demand in extra], ahead) * costs.largest

    def _beside(self, costs: Costs, extra: list[Demand], count: int | None = None) -> int:
        """Bytes of all but rows in layers that keep every token: windows, states, prefixes.

        ``count`` None: of all rows; else as if only so many were left.
        """
        in_prefixes = sum(prefix.num_own for prefix in self.all_prefixes.values())
        needed = in_prefixes * costs.per_prefix_token
        # Every row up to the highest slot has a state, even if the slot is free.
        rows = self.main.rows_for(self.num_active + len(extra))
        rows = max(self.main.num_rows, rows) if count is None else count
        needed += rows * costs.per_row
        for window, size in costs.per_window.items():
            layout = self.all.get(window) or SlotLayout(self.num_slots, window)
            cells = layout.cells_needed(extra)
            needed += (cells if count is None else cells * count // max(1, layout.rows)) * size
        return needed

    def bytes_held(self, costs: Costs) -> int:
        """Bytes of the slots as they are now, with shared prefixes."""
        main = self.main.rows * self.main.capacity * (costs.per_token + costs.largest)
        return main + self._beside(costs, [])

    def max_cells(
        self,
        costs: Costs,
        num_bytes: int,
        extra: list[Demand],
        count: int | None = None,
    ) -> int | None:
        """Cells that the layers with every token may have, so that all need ``num_bytes`` at most.

        ``extra`` rows are to come in; or only ``count`` rows are to be left. None: these layers
        take nothing.
        """
        each = costs.per_token + costs.largest
        if not each:
            return None
        left = num_bytes - self._beside(costs, extra, count)
        return max(0, left // each)

    def drop(self) -> None:
        """If no row is in a slot, the next row starts with buffers of its own size."""
        for layout in self.all.values():
            layout.drop()

    def make_way(self, demand: Demand, prefix: PrefixPart | None = None) -> tuple[int, Move | None]:
        """Choose a slot; the row that was there, if any, has moved in the layouts.

        Raises ValueError when no slot is free.
        """
        ranks = {slot: self._ranks(other) for slot, other in self.prefixes.items()}
        own = self._ranks(prefix) if prefix else ()
        length = None if self._in_any_order else demand.own.length
        slot, free = self.main.choose(length, own, ranks)
        if free is None:
            return slot, None
        move = Move(slot, free)
        self._move(move)
        return slot, move

    def _ranks(self, prefix: PrefixPart) -> Ranks:
        """Of the parts of a chain whose rows are to be neighbours."""
        least = TOGETHER_TOKENS if self._in_any_order else 0
        return tuple(part.rank for part in prefix.chain if part.num_own >= least)

    def admit(
        self,
        demand: Demand,
        slot: int,
        prefix: PrefixPart | None = None,
        max_cells: int | None = None,
    ) -> Changes:
        """Give a row the free slot ``slot``; all buffers then have equally many rows.

        Raises NoRoom, before anything is changed, when main's cells would exceed ``max_cells``.
        """
        if demand.shared != (0 if prefix is None else prefix.num_tokens):
            raise ValueError(f"a row that shares {demand.shared} tokens does not fit its prefix")
        found: dict[Window, Relayout | None] = {
            None: self.main.admit(demand.own, slot, None, max_cells)[1]
        }
        if prefix is not None:
            self.prefixes[slot] = prefix
        for window, layout in self.all.items():
            if window is not None:
                found[window] = layout.admit(demand, slot, self.main.rows)[1]
        return {window: change for window, change in found.items() if change is not None}

    def _move(self, move: Move) -> None:
        for layout in self.all.values():
            layout.move(move.source, move.target)
        if (prefix := self.prefixes.pop(move.source, None)) is not None:
            self.prefixes[move.target] = prefix

    def before_step(self, max_cells: int | None = None) -> Changes:
        """Make sure that every write column exists; raises NoRoom before anything is changed."""
        found: dict[Window, Relayout | None] = {None: self.main.before_step(max_cells)}
        found |= {window: self.all[window].before_step() for window in self.all if window}
        return {window: change for window, change in found.items() if change is not None}

    def shrink(self, *, is_tight: bool = False) -> Changes:
        """Drop the rows above the highest slot in use; ``is_tight``: free columns, too."""
        found = {window: one.shrink(is_tight=is_tight) for window, one in self.all.items()}
        return {window: change for window, change in found.items() if change is not None}

    def after_step(self) -> None:
        """Every row has written its columns."""
        for layout in self.all.values():
            layout.after_step()

    def release(self, slot: int) -> None:
        """Take a row's slot back."""
        for layout in self.all.values():
            layout.release(slot)
        self.prefixes.pop(slot, None)

    def size(self, slot: int) -> int:
        """Tokens of a row, those of its shared prefix included."""
        prefix = self.prefixes.get(slot)
        return self.main.length(slot) + (0 if prefix is None else prefix.num_tokens)

    def close_gap(self) -> Move | None:
        """Move a row into the lowest free slot below it; None when there is none.

        It is the last of the next rows that share a prefix, or have none. So rows with one prefix
        stay together, and the gap moves up until it is gone.
        """
        gap = self.main.gap()
        if gap is None:
            return None
        above = sorted(slot for slot in self.main.slots if slot > gap[1])
        prefix = self.prefixes.get(above[0])
        run = takewhile(lambda slot: self.prefixes.get(slot) is prefix, above)
        move = Move(max(run), gap[1])
        self._move(move)
        return move

    def close_gaps(self, most: int = 0) -> list[Move]:
        """Move rows into free slots below them, until none is left or rows are in ``most`` slots.

        In the order of the moves each target is free. No row moves twice, because its new slot is
        below all gaps that are left. A row may enter a slot that another has left.
        """
        moves = []
        while self.main.num_rows > most and (move := self.close_gap()) is not None:
            moves.append(move)
        return moves

    def check(self) -> None:
        """Raise AssertionError if the layouts contradict each other."""
        for layout in self.all.values():
            layout.check()
            assert (layout.slots, layout.rows) == (self.main.slots, self.main.rows)
        assert self.prefixes.keys() <= self.main.slots
        held = self.all_prefixes
        assert all(
            held[prefix.key] is prefix for leaf in self.prefixes.values() for prefix in leaf.chain
        )
