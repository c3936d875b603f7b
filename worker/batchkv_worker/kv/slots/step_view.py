"""The columns that one decode step reads and writes, the same for all layers of a kind.

Rows in neighbouring slots differ in length. If all rows were read from the first column of the
longest, most cells would be read in vain. So attention reads groups: runs of slots, each from its
own first column on. Groups are cut when rows enter or leave. More groups waste fewer cells but
launch more kernels, so each counts as ``group_cost`` cells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, cast

import mlx.core as mx

from batchkv_worker.kv.attention.records import bounds_of, chain_of
from batchkv_worker.kv.backends.host_numbers import host_numbers
from batchkv_worker.kv.slots.growth import round_up
from batchkv_worker.kv.slots.layout import SlotLayout
from batchkv_worker.kv.slots.layouts import SlotLayouts
from batchkv_worker.kv.slots.pool_view import PoolView, view_of
from batchkv_worker.kv.slots.prefix_pool import PrefixPool, pays
from batchkv_worker.kv.slots.row_groups import cut
from batchkv_worker.kv.types import Window

if TYPE_CHECKING:
    from batchkv_worker.kv.attention.shared_prefix import SharedPrefix


@dataclass(frozen=True, slots=True)
class Shapes:
    """How shapes are chosen: ``step`` columns and ``rows`` rows of a group are rounded up to.

    ``padded_rows`` is how many rows a step computes for rows in use; None rounds those up, too.
    ``group_cost`` is what one more group costs, in cells (one row's keys and values of one column).
    ``mask_rank`` is 4, or 5 for a model that folds its query heads itself.
    """

    step: int = 1
    rows: int = 1
    padded_rows: Callable[[int], int] | None = None
    group_cost: int = 2048
    mask_rank: int = 4

    def rows_of_step(self, layout: SlotLayout, used: int | None = None) -> int:
        """Rows that a step computes, as far as the buffers have so many; see ``padded_rows``."""
        used = layout.num_rows if used is None else used
        padded = round_up(used, self.rows) if self.padded_rows is None else self.padded_rows(used)
        return min(layout.rows, padded)


Cells = tuple[slice, slice, slice]  # rows, heads and columns of a buffer
_ALL = slice(None)


@dataclass(frozen=True, slots=True)
class Group:
    """Rows [first, last) read columns [low, high). They share ``prefix``.

    ``mask`` is as in ``ColumnSpan``. ``prefixes`` are those of the chain that no neighbouring group
    reads too. ``is_exact``: its columns are not rounded, where others are.
    """

    first: int
    last: int
    low: int
    high: int
    mask: mx.array | None
    prefix: SharedPrefix | None = None
    prefixes: tuple[SharedPrefix, ...] = ()
    is_exact: bool = False

    @property
    def cells(self) -> Cells:
        """Its part of a buffer ``[rows, heads, columns, size]``."""
        return slice(self.first, self.last), _ALL, slice(self.low, self.high)


@dataclass(frozen=True, slots=True)
class CommonPrefix:
    """A shared prefix that several groups have in common: those of rows [first, last)."""

    prefix: SharedPrefix
    first: int
    last: int

    def has(self, group: Group) -> bool:
        """Whether the group is one of these."""
        return self.first <= group.first < self.last


Run = tuple[int, int, "SharedPrefix | None"]  # the rows of a group, and their prefix


def common_prefixes(runs: Sequence[Run]) -> list[CommonPrefix]:
    """The shared prefixes that neighbouring groups have in common."""
    found = []
    chains = [prefix.chain if prefix else [] for *_, prefix in runs]
    for depth in range(max(map(len, chains), default=0)):
        first = 0
        at_depth = groupby(chain[depth] if depth < len(chain) else None for chain in chains)
        for prefix, same in at_depth:
            last = first + sum(1 for _ in same) - 1
            if prefix is not None and last > first:
                found.append(CommonPrefix(prefix, runs[first][0], runs[last][1]))
            first = last + 1
    return found


def _in_common(runs: Sequence[Run], place: int) -> SharedPrefix | None:
    """The last shared prefix that the runs before and after one have in common."""
    chains = [
        run[2].chain if run[2] else [] for run in (*runs[:place][-1:], *runs[place + 1 :][:1])
    ]
    if len(chains) < 2:
        return None
    same = [one for one, other in zip(*chains, strict=False) if one is other]
    return same[-1] if same else None


class ColumnSpan:
    """Columns that the current step reads in the layers that share a layout.

    Rows [0, num_rows) read columns [low, high). ``mask`` is bool ``[rows, 1, 1, columns]``, or None
    when every row owns every column. ``write`` is the column that the step writes; it is the last,
    unless shapes are rounded. ``written`` are its cells. ``stored`` is how many cells the buffers
    of these rows have.
    """

    pool: PoolView | None = None  # where the rows' prefixes are attended in the pool

    # The attributes that are numbers of the host.
    FIXED = (
        *("num_rows", "stored", "write", "low", "high", "written"),
        *("_starts", "_used", "_cuts", "_shapes", "_is_whole"),
    )

    def __init__(
        self,
        layout: SlotLayout,
        rows: int,
        cuts: list[int],
        shapes: Shapes,
        prefixes: Mapping[int, SharedPrefix] | None = None,
        *,
        is_whole: bool = False,
    ) -> None:
        """``is_whole``: each row is read by its ``bounds`` alone, so there are no groups.

        Then ``low`` and ``high`` are those of the buffer, which are the same for many steps.
        """
        step = shapes.step
        self.num_rows = rows
        self.stored = rows * layout.capacity
        self.write = layout.write
        self.low = 0 if is_whole else layout.lowest // step * step
        self.high = layout.capacity
        if not is_whole:
            self.high = min(layout.capacity, round_up(self.write + 1, step))
        self._is_whole = is_whole
        self.written: Cells = slice(rows), _ALL, slice(self.write, self.write + 1)
        self._starts = [layout.start(slot) for slot in range(rows)]
        self._used = layout.slots
        self._cuts = cuts
        self._shapes = shapes
        self._prefixes = prefixes or {}

    def store(self, part: mx.array, new: mx.array) -> mx.array:
        """The buffer ``part`` with ``new`` ``[rows, heads, 1, size]`` in the step's column."""
        part[self.written] = new
        return part

    @property
    def prefixes(self) -> list[tuple[int, SharedPrefix]]:
        """The shared prefix of each slot that has one."""
        return [(slot, one) for slot, one in self._prefixes.items() if slot < self.num_rows]

    @cached_property
    def shape_of_groups(self) -> tuple[tuple[int, int, int, bool, int], ...]:
        """Of each group its rows, first column, whether it has a mask, and the prefix's rank."""
        if self._is_whole:
            return ()
        step = self._shapes.step
        lows = [min(self._starts[first:last]) // step * step for first, last, _ in self._runs]
        return tuple(
            [
                (first, last, low, self._hides(first, last, low), prefix.rank if prefix else 0)
                for (first, last, prefix), low in zip(self._runs, lows, strict=True)
            ]
        )

    @property
    def exact_columns(self) -> tuple[tuple[int, int] | None, ...]:
        """Of each group the columns that it reads exactly, if its rows have one length."""
        firsts = [{*self._starts[first:last]} for first, last, _ in self._runs]
        return tuple([(min(one), self.write) if len(one) == 1 else None for one in firsts])

    @cached_property
    def mask(self) -> mx.array | None:
        return self._masked(0, self.num_rows, self.low, None)

    def windowed(self, window: int) -> mx.array | None:
        """The mask of a layer that keeps more than the window that its model asks for."""
        return self._masked(0, self.num_rows, self.low, window)

    @cached_property
    def groups(self) -> list[Group]:
        found = []
        step = self._shapes.step
        for first, last, prefix in self._runs:
            low = min(self._starts[first:last]) // step * step
            mask = self._masked(first, last, low, None)
            alone = self._alone(first, prefix)
            found.append(Group(first, last, low, self.high, mask, prefix, alone))
        if len(found) == 1:
            found[0] = replace(found[0], low=self.low, mask=self.mask)
        return found

    def _alone(self, first: int, prefix: SharedPrefix | None) -> tuple[SharedPrefix, ...]:
        """The part of a chain that no neighbour of the group from row ``first`` on has, too."""
        taken = {one.prefix for one in self.common if one.first <= first < one.last}
        return tuple(one for one in (prefix.chain if prefix else ()) if one not in taken)

    @cached_property
    def segments(self) -> list[CommonPrefix]:
        """Every shared prefix once, with the neighbouring rows that have it."""
        alone = [
            CommonPrefix(one, first, last)
            for first, last, prefix in self._runs
            for one in self._alone(first, prefix)
        ]
        return [*self.common, *alone]

    @cached_property
    def chain(self) -> mx.array:
        """Which results over ``segments`` each row has (``attention.records.chain_of``)."""
        return chain_of([(one.first, one.last) for one in self.segments], self.num_rows)

    @cached_property
    def bounds(self) -> mx.array:
        """Of each row its first column and the one after its last; free slots have none."""
        ends = [
            self.write + 1 if slot in self._used else start
            for slot, start in enumerate(self._starts)
        ]
        return bounds_of(self._starts, ends)

    @cached_property
    def longest(self) -> int:
        """A bound of the columns of any row, the same for many steps."""
        return round_up(self.write + 1 - min(self._starts, default=self.write))

    @cached_property
    def visible(self) -> int:
        """Cells that the groups read."""
        return sum((one.last - one.first) * (one.high - one.low) for one in self.groups)

    @cached_property
    def common(self) -> list[CommonPrefix]:
        """The shared prefixes that are attended once for the rows of several groups."""
        return common_prefixes(self._runs)

    @cached_property
    def _runs(self) -> list[Run]:
        found: list[Run] = []
        for first, last in pairwise([0, *self._cuts, self.num_rows]):
            prefixes = (
                self._prefixes[slot] for slot in range(first, last) if slot in self._prefixes
            )
            found.append((first, last, next(prefixes, None)))
        # Free rows between two branches must not split the prefixes that the branches share.
        return [
            (
                first,
                last,
                _in_common(found, place) if self._used.isdisjoint(range(first, last)) else prefix,
            )
            for place, (first, last, prefix) in enumerate(found)
        ]

    @cached_property
    def exact_groups(self) -> list[Group]:
        """The groups for kernels that take any number of columns: rows of one length, no mask.

        Where shapes are rounded, only the rounding would need a mask, and a fused kernel may take
        twice as long with one.
        """
        return [self._exact(group) for group in self.groups]

    def _exact(self, group: Group) -> Group:
        starts = {*self._starts[group.first : group.last]}
        if group.mask is None or len(starts) > 1:
            return group
        return replace(group, low=starts.pop(), high=self.write + 1, mask=None, is_exact=True)

    def _masked(self, first: int, last: int, low: int, window: int | None) -> mx.array | None:
        starts = self._starts[first:last]
        if window is not None:
            starts = [max(start, self.write - window + 1) for start in starts]
        if self.high == self.write + 1 and all(start == low for start in starts):
            return None
        return self._compared(mx.array(starts), self.write, low)

    def _hides(self, first: int, last: int, low: int) -> bool:
        """Whether columns from ``low`` on are hidden from some of the rows."""
        starts = self._starts[first:last]
        return self.high > self.write + 1 or any(start != low for start in starts)

    def _compared(self, starts: mx.array, write: mx.array | int, low: int) -> mx.array:
        """The mask of rows that begin at ``starts``; ``write`` is the last column they see."""
        columns = mx.arange(low, self.high)
        shape = (starts.shape[0], *[1] * (self._shapes.mask_rank - 1))
        return (columns >= starts.reshape(shape)) & (columns <= write)


@dataclass(frozen=True, slots=True)
class StepView:
    """The step at hand. ``offsets`` (int32, ``[rows]``) are the positions of its tokens.

    Each step has a new array, which never changes, because models may keep a reference to it.
    """

    num_rows: int
    offsets: mx.array
    spans: Mapping[Window, ColumnSpan]


class StepViews:
    """Makes each step's view; keeps the ends of groups until a row enters or leaves."""

    def __init__(self, shapes: Shapes, *, pools: bool = False) -> None:
        """``pools``: all layers that keep every token have a pool of prefixes."""
        self.shapes = shapes
        self._cuts: dict[Window, list[int]] = {}
        self._made_for: tuple[int, int, int] | None = None  # version, rows, age of the cuts
        self._pool = PrefixPool() if pools else None

    def view(self, layouts: SlotLayouts) -> StepView:
        """The next step of ``layouts``."""
        main, shapes = layouts.main, self.shapes
        rows = shapes.rows_of_step(main)
        made_for = (main.version, rows, main.write // 64)  # windows change as rows grow
        if made_for != self._made_for:
            self._made_for = made_for
            self._cuts = {window: self._cut(layout, rows) for window, layout in layouts.all.items()}
            self._cuts[None] = self._cut_by_prefix(layouts, rows)
        # ``DecodeSlots`` gives parts with arrays to the layouts, whose type has no arrays.
        prefixes = cast("Mapping[int, SharedPrefix]", layouts.prefixes)
        spans = {
            window: self._whole(layout, rows)
            if self._pool is not None
            else ColumnSpan(layout, rows, self._cuts[window], shapes)
            for window, layout in layouts.all.items()
        }
        spans[None] = self._main_span(main, rows, prefixes)
        return StepView(rows, host_numbers([*map(layouts.size, range(rows))]), spans)

    def _whole(self, layout: SlotLayout, rows: int) -> ColumnSpan:
        return ColumnSpan(layout, rows, [], self.shapes, is_whole=True)

    def _main_span(
        self, main: SlotLayout, rows: int, prefixes: Mapping[int, SharedPrefix]
    ) -> ColumnSpan:
        """That of the layers that keep every token, which may share prefixes."""
        span = ColumnSpan(main, rows, self._cuts[None], self.shapes, prefixes)
        if self._pool is None:
            return span
        lengths = [one.num_tokens for slot, one in prefixes.items() if slot < rows]
        if lengths and not pays(lengths, len(span.segments)):
            self._pool.hold({})
            return span
        whole = self._whole(main, rows)
        if lengths:
            whole.pool = view_of(self._pool, [prefixes.get(slot) for slot in range(rows)])
        else:
            self._pool.hold({})
        return whole

    def _cut(self, layout: SlotLayout, rows: int) -> list[int]:
        lengths = [layout.length(slot) + 1 for slot in range(rows)]
        return cut(lengths, self.shapes.group_cost, self.shapes.rows)

    def _cut_by_prefix(self, layouts: SlotLayouts, rows: int) -> list[int]:
        """Cuts at each change of the shared prefix, and by length between two changes."""
        main, used = layouts.main, layouts.main.slots
        lengths = [main.length(slot) + 1 for slot in range(rows)]
        edges, last = [0], None
        for slot in sorted(slot for slot in used if slot < rows):
            prefix = layouts.prefixes.get(slot)
            if last is not None and prefix is not last[0]:
                edges.append(slot)
            last = (prefix,)
        cuts = edges[1:]
        for low, high in zip(edges, [*edges[1:], rows], strict=True):
            inner = cut(lengths[low:high], self.shapes.group_cost, self.shapes.rows)
            cuts += [low + place for place in inner]
        return sorted(cuts)
