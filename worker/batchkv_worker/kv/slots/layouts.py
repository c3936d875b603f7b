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
from batchkv_worker.kv.types import Window

Changes = dict[Window, Relayout]


@dataclass(frozen=True, slots=True)
class Costs:
    """Bytes of a model's caches under a scheme.

    ``per_token``: of all layers that keep every token; ``per_window``: bytes a token of the layers
    with a window, by window; ``per_row``: of what has no time axis; ``beside_stem``: what a token
    of a stem takes beside ``per_token``, where prefill reads it in another form than slots do;
    ``largest``: a token's share of ``per_token`` in the layer that has most, of which two copies
    stand while a buffer is rebuilt.
    """

    per_token: int
    per_window: dict[int, int] = field(default_factory=dict)
    per_row: int = 0
    beside_stem: int = 0
    largest: int = 0

    @property
    def per_stem_token(self) -> int:
        """Bytes that a token takes in a stem."""
        return self.per_token + self.beside_stem

    @property
    def per_new_token(self) -> int:
        """Bytes that a token takes while it is in every window."""
        return self.per_token + sum(self.per_window.values())

    def prefill(self, length: int, shared: int, margin: int) -> int:
        """Bytes of one row in prefill among rows of up to ``length`` tokens.

        ``shared`` of them stand in a stem; ``margin`` tokens are held beside a window.
        """
        windows = sum(
            size * min(length, window + margin) for window, size in self.per_window.items()
        )
        # Prefill reads a stem where it stands only when that is most of the prompt.
        own = length - shared if 2 * shared >= length else length
        return own * (self.per_token + self.largest) + windows + self.per_row


class SlotLayouts:
    """Slots, and their columns in every layout."""

    def __init__(self, num_slots: int, windows: Iterable[int] = ()) -> None:
        self.main = SlotLayout(num_slots)
        self.all: dict[Window, SlotLayout] = {None: self.main}
        self.all.update({window: SlotLayout(num_slots, window) for window in sorted(set(windows))})
        self.stems: dict[int, PrefixPart] = {}  # by slot

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
    def all_stems(self) -> dict[bytes, PrefixPart]:
        """The stems that are held, by key: those of rows, and those that these stand on."""
        return {stem.key: stem for leaf in {*self.stems.values()} for stem in leaf.chain}

    def stems_with(self, other: PrefixPart | None) -> dict[bytes, PrefixPart]:
        """The same, with ``other`` and what it stands on, which no row may have yet."""
        return self.all_stems | {stem.key: stem for stem in (other.chain if other else ())}

    def tokens_held(self, keys: Iterable[bytes], behind: PrefixPart | None = None) -> int:
        """How many tokens of a chain of blocks stand in stems that are held, or are ``behind``."""
        held = self.stems_with(behind)
        return max((held[key].num_tokens for key in keys if key in held), default=0)

    def bytes_of_new(
        self, costs: Costs, stem: PrefixPart | None, behind: PrefixPart | None = None
    ) -> int:
        """Bytes of those of a chain of stems that no row has yet, and that are not ``behind``."""
        held = self.stems_with(behind)
        new = sum(one.num_own for one in (stem.chain if stem else ()) if one.key not in held)
        return new * costs.per_stem_token

    def peak_bytes(
        self, costs: Costs, extra: list[Demand], ahead: int | None, stem_keys: list[bytes]
    ) -> int:
        """The most that the slots hold with ``extra`` rows admitted: as they are, and grown.

        The arguments are those of ``bytes_needed``.
        """
        held = self.bytes_held(costs) + self.stem_bytes(costs, extra, stem_keys)
        return max(self.bytes_needed(costs, extra, ahead, stem_keys), held)

    def bytes_needed(
        self,
        costs: Costs,
        extra: list[Demand],
        ahead: int | None = None,
        stem_keys: Iterable[bytes] = (),
    ) -> int:
        """Bytes that the slots would grow to with ``extra`` rows admitted, who share stems if any.

        ``stem_keys`` are the blocks of those: what is held already does not count. ``ahead`` is how
        many tokens are reckoned with for each row at most; None: all that may still come.
        """
        needed = self.main.cells_needed([demand.own for demand in extra], ahead) * costs.per_token
        needed += self._copied(costs, extra, ahead)
        return needed + self.stem_bytes(costs, extra, stem_keys) + self._beside(costs, extra)

    def stem_bytes(self, costs: Costs, extra: list[Demand], stem_keys: Iterable[bytes] = ()) -> int:
        """Bytes of what ``extra`` rows share and no stem holds yet, as in ``bytes_needed``."""
        shared = max((demand.shared for demand in extra), default=0)
        shared -= min(shared, self.tokens_held(stem_keys))
        return shared * costs.per_stem_token

    def _copied(self, costs: Costs, extra: list[Demand], ahead: int | None) -> int:
        """Bytes of the largest layer as it will be: it stands twice while it is rebuilt."""
        return self.main.cells_needed([demand.own for demand in extra], ahead) * costs.largest

    def _beside(self, costs: Costs, extra: list[Demand], count: int | None = None) -> int:
        """Bytes of everything but the layers that keep every token: windows, states, stems.

        ``count`` None: of all rows; else as if only so many were left.
        """
        in_stems = sum(stem.num_own for stem in self.all_stems.values())
        needed = in_stems * costs.per_stem_token
        # States stand in every row up to the highest slot, whether anybody is in it or not.
        rows = self.main.rows_for(self.num_active + len(extra))
        rows = max(self.main.num_rows, rows) if count is None else count
        needed += rows * costs.per_row
        for window, size in costs.per_window.items():
            layout = self.all.get(window) or SlotLayout(self.num_slots, window)
            cells = layout.cells_needed(extra)
            needed += (cells if count is None else cells * count // max(1, layout.rows)) * size
        return needed

    def bytes_held(self, costs: Costs) -> int:
        """Bytes of the slots as they are now, stems among them."""
        main = self.main.rows * self.main.capacity * (costs.per_token + costs.largest)
        return main + self._beside(costs, [])

    def max_cells(
        self,
        costs: Costs,
        num_bytes: int,
        extra: list[Demand],
        count: int | None = None,
    ) -> int | None:
        """Cells that the layers with every token may have for all to stay within ``num_bytes``.

        ``extra`` rows are to come in; or only ``count`` rows are to be left. None: these layers
        take nothing.
        """
        each = costs.per_token + costs.largest
        if not each:
            return None
        left = num_bytes - self._beside(costs, extra, count)
        return max(0, left // each)

    def drop(self) -> None:
        """With nobody in: the next row starts with buffers of its own size."""
        for layout in self.all.values():
            layout.drop()

    def make_way(self, demand: Demand, stem: PrefixPart | None = None) -> tuple[int, Move | None]:
        """Choose a slot; the row that stood there, if any, has moved in the layouts.

        Raises ValueError when no slot is free.
        """
        ranks = {slot: other.ranks for slot, other in self.stems.items()}
        slot, free = self.main.choose(demand.own.length, stem.ranks if stem else (), ranks)
        if free is None:
            return slot, None
        move = Move(slot, free)
        self._move(move)
        return slot, move

    def admit(
        self,
        demand: Demand,
        slot: int,
        stem: PrefixPart | None = None,
        max_cells: int | None = None,
    ) -> Changes:
        """Give a row the free slot ``slot``; all buffers then have equally many rows.

        Raises NoRoom, before anything is changed, when main's cells would exceed ``max_cells``.
        """
        if demand.shared != (0 if stem is None else stem.num_tokens):
            raise ValueError(f"a row that shares {demand.shared} tokens does not fit its stem")
        found: dict[Window, Relayout | None] = {
            None: self.main.admit(demand.own, slot, None, max_cells)[1]
        }
        if stem is not None:
            self.stems[slot] = stem
        for window, layout in self.all.items():
            if window is not None:
                found[window] = layout.admit(demand, slot, self.main.rows)[1]
        return {window: change for window, change in found.items() if change is not None}

    def _move(self, move: Move) -> None:
        for layout in self.all.values():
            layout.move(move.source, move.target)
        if (stem := self.stems.pop(move.source, None)) is not None:
            self.stems[move.target] = stem

    def before_step(self, max_cells: int | None = None) -> Changes:
        """Make sure that every write column exists; raises NoRoom before anything is changed."""
        found: dict[Window, Relayout | None] = {None: self.main.before_step(max_cells)}
        found |= {window: self.all[window].before_step() for window in self.all if window}
        return {window: change for window, change in found.items() if change is not None}

    def shrink(self) -> Changes:
        """Let go of the rows above the highest slot in use."""
        found = {window: layout.shrink() for window, layout in self.all.items()}
        return {window: change for window, change in found.items() if change is not None}

    def after_step(self) -> None:
        """Every row has written its columns."""
        for layout in self.all.values():
            layout.after_step()

    def release(self, slot: int) -> None:
        """Take a row's slot back."""
        for layout in self.all.values():
            layout.release(slot)
        self.stems.pop(slot, None)

    def size(self, slot: int) -> int:
        """Tokens of a row, its stem's among them."""
        stem = self.stems.get(slot)
        return self.main.length(slot) + (0 if stem is None else stem.num_tokens)

    def close_gap(self) -> Move | None:
        """Move a row into the lowest free slot below it; None when there is none.

        The last of the next rows that share a stem, or have none: so stems stay together, and the
        gap goes up until it is gone.
        """
        gap = self.main.gap()
        if gap is None:
            return None
        above = sorted(slot for slot in self.main.slots if slot > gap[1])
        stem = self.stems.get(above[0])
        run = takewhile(lambda slot: self.stems.get(slot) is stem, above)
        move = Move(max(run), gap[1])
        self._move(move)
        return move

    def check(self) -> None:
        """Raise AssertionError when the books do not balance."""
        for layout in self.all.values():
            layout.check()
            assert (layout.slots, layout.rows) == (self.main.slots, self.main.rows)
        assert self.stems.keys() <= self.main.slots
        held = self.all_stems
        assert all(held[stem.key] is stem for leaf in self.stems.values() for stem in leaf.chain)
