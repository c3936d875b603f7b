"""The decode slots of all layers, and the layouts that they follow.

Layouts decide, and layers follow. Every move of a row goes through here, so that it reaches all
layers and layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx

from batchkv_worker.kv.attention.shared_prefix import SharedPrefix
from batchkv_worker.kv.backends.contract import Backend
from batchkv_worker.kv.layers.contract import LayerKind, PrefillLayer, SlotLayer
from batchkv_worker.kv.layers.discover import CacheTree
from batchkv_worker.kv.layers.row_moves import RowMoves
from batchkv_worker.kv.layers.slot_costs import have_pools
from batchkv_worker.kv.layers.step_graphs import StepGraphs
from batchkv_worker.kv.slots.changes import Arrivals, Demand, Move
from batchkv_worker.kv.slots.growth import NoRoom
from batchkv_worker.kv.slots.layouts import Changes, SlotLayouts
from batchkv_worker.kv.slots.step_view import Shapes, StepView, StepViews
from batchkv_worker.kv.types import Pieces

FIRST_SHARE = 4  # of a model's layers, one of so many may start before the last step has ended


class DecodeSlots:
    """Rows that decode: admitted, stepped together, moved, snapshot, released."""

    def __init__(
        self,
        backend: Backend,
        kinds: Sequence[LayerKind],
        tree: CacheTree,
        num_slots: int,
        shapes: Shapes,
        *,
        replays: bool = False,
        before_computing: Callable[[], None] = lambda: None,
    ) -> None:
        """``replays``: the graph of a step may be used again for the next (``StepGraphs``).

        ``before_computing`` is called before anything is computed that is no part of a step.
        """
        self._backend = backend
        self._windows = [kind.window for kind in kinds]
        pools = have_pools(kinds)
        windows = [window for window in self._windows if window is not None]
        self.layouts = SlotLayouts(num_slots, windows, in_any_order=pools)
        self.layers: list[SlotLayer] = [kind.slots() for kind in kinds]
        self.model_cache: list[Any] = tree.nested(self.layers)
        self._kinds = kinds
        for place, layer in enumerate(self.layers):
            layer.place = place
        self._views = StepViews(shapes, pools=pools)
        self._view: StepView | None = None
        self.graphs = StepGraphs(self.layers, self.model_cache) if replays else None
        self._before_computing = before_computing

    @property
    def arrays(self) -> list[mx.array]:
        """All buffers."""
        return [array for layer in self.layers for array in layer.arrays]

    @property
    def first_arrays(self) -> list[mx.array]:
        """The buffers of the first layers, which a step may write before the last step has ended.

        They are so few that most of a step is still built while the step before it is launched.
        """
        return [array for layer in self.layers[: self._num_first] for array in layer.arrays]

    @property
    def unread_arrays(self) -> list[mx.array]:
        """What a step computes for the next one alone: the launch that ends a step must name it.

        It names no other buffer. MLX holds what a launch names until all of it has ended, and
        copies a buffer that is held when it is to be written: by the next step, soon after.
        """
        return [array for layer in self.layers for array in layer.unread]

    @property
    def _num_first(self) -> int:
        return max(1, len(self.layers) // FIRST_SHARE) if len(self.layers) > 1 else 0

    def mark(self) -> mx.array | None:
        """An array ``[1, ...]`` that is computed after the first layers; None if there are none.

        MLX copies a buffer instead of writing in place while the device still computes with it. So
        the mark is a number that the layer after them writes, when their attention has ended. It
        keeps no buffer alive.
        """
        after = [array for layer in self.layers[self._num_first :] for array in layer.arrays]
        if not self.first_arrays or not after:
            return None
        number = after[0][(slice(0, 1),) * after[0].ndim]
        return number.astype(mx.int32 if number.dtype == mx.float32 else mx.float32)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers as they are now."""
        return sum(layer.nbytes for layer in self.layers)

    def size(self, slot: int) -> int:
        """Tokens of the row in ``slot``."""
        return self.layouts.size(slot)

    def make_prefix(
        self,
        key: bytes,
        num_tokens: int,
        pieces: Mapping[int, Pieces],
        parent: SharedPrefix | None = None,
    ) -> SharedPrefix:
        """Make a shared prefix of ``num_tokens``.

        ``pieces`` ``[1, ...]`` are of each leaf that keeps every token, and of the tokens after
        ``parent``.
        """
        packed, slots = {}, {}
        for place, piece in pieces.items():
            packed[place], slots[place] = self.layers[place].as_prefix(piece)
        prefix = SharedPrefix(key, num_tokens, parent, packed=packed, slots=slots)
        mx.async_eval(prefix.arrays)  # the blocks that it is made of never change
        return prefix

    def admit(
        self,
        demand: Demand,
        pieces: Sequence[Pieces] | None,
        prefix: SharedPrefix | None = None,
        max_cells: int | None = None,
    ) -> tuple[int, Move | None]:
        """Give a row a slot and copy it in; None for a row without any token yet.

        With a prefix, the pieces of layers that keep every token are of the tokens after it.
        Returns the slot, and how another row moved to make it free. Raises ValueError if no slot is
        free, NoRoom if the layers with every token would have more than ``max_cells``.
        """
        slot, move = self.place(demand, prefix, max_cells)
        self.fill(slot, pieces)
        self.settle()
        return slot, move

    def place(
        self, demand: Demand, prefix: SharedPrefix | None = None, max_cells: int | None = None
    ) -> tuple[int, Move | None]:
        """The first half of ``admit``: a slot, which is to be filled before the next step.

        Rows that are placed later may move it.
        """
        slot, move = self.layouts.make_way(demand, prefix)
        if move is not None:
            self._move([move])
        try:
            changes = self.layouts.admit(demand, slot, prefix, max_cells)
        except NoRoom:
            raise NoRoom(move) from None
        self._relayout(changes)
        return slot, move

    def fill(self, slot: int, pieces: Sequence[Pieces] | None) -> None:
        """The second half: copy a row in, or rows of one length into neighbouring slots."""
        layouts = self.layouts.of(self._windows)
        for index, (layer, layout) in enumerate(zip(self.layers, layouts, strict=True)):
            layer.admit(slot, layout.write, None if pieces is None else pieces[index])

    def fill_group(self, rows: Arrivals, group: Sequence[PrefillLayer]) -> None:
        """The same for rows of a computed group, whose layers these are."""
        layouts = self.layouts.of(self._windows)
        for layer, layout, source in zip(self.layers, layouts, group, strict=True):
            if layer.admit_group(rows, layout.write, source):
                continue
            for row, count in rows.runs():
                is_empty = not row.length
                pieces = None if is_empty else source.row(row.place, row.length, row.shared, count)
                layer.admit(row.slot, layout.write, pieces)

    def settle(self, *, waits: bool = True) -> None:
        """After rows were copied in: have that computed. It frees the rows' own arrays.

        Without ``waits`` the next step does it. Layers that start their part of a step start this
        part now.
        """
        left = [layer.arrays for layer in self.layers if not layer.settle()]
        if waits:
            mx.eval(left)

    def snapshot(self, slot: int) -> list[Pieces]:
        """A copy of a row in every layer, in the form for ``admit`` with the same prefix."""
        return [
            layer.snapshot(slot, layout.start(slot), layout.write)
            for layer, layout in zip(self.layers, self.layouts.of(self._windows), strict=True)
        ]

    def row_bytes(self, slot: int) -> int:
        """Bytes of a row's snapshot, at most."""
        layouts = self.layouts.of(self._windows)
        return sum(
            layout.length(slot) * kind.bytes_per_token + kind.bytes_per_row
            for layout, kind in zip(layouts, self._kinds, strict=True)
        )

    def release(self, slot: int) -> None:
        """Release a row's slot; this copies nothing."""
        had_prefix = slot in self.layouts.prefixes
        self.layouts.release(slot)
        if had_prefix and not self.layouts.prefixes:  # perhaps no step follows that would do it
            for layer in self.layers:
                layer.drop_pool()

    def close_gaps(self, most: int = 0) -> list[Move]:
        """Move rows into free slots below them, all together, until they are in ``most`` slots.

        Returns how rows moved, in an order in which each one's new slot is free.
        """
        moves = self.layouts.close_gaps(most)
        self._move(moves)
        return moves

    def rows_of_step(self, used: int | None = None) -> int:
        """Rows that a step computes; ``used``: as if the rows were in so many first slots."""
        return self._views.shapes.rows_of_step(self.layouts.main, used)

    def make_room(self, max_cells: int | None) -> None:
        """Make sure that the next step has its columns; raises NoRoom."""
        self._relayout(self.layouts.before_step(max_cells))

    def shrink(self, *, is_tight: bool = False) -> list[Move]:
        """Close gaps between rows and drop the buffers' other rows. Returns how rows moved.

        ``is_tight``: drop columns that the next step does not need, too.
        """
        moves = self.close_gaps()
        self._relayout(self.layouts.shrink(is_tight=is_tight))
        return moves

    def begin_step(self) -> StepView:
        """Make room for one token a row; the model may then be run on ``model_cache``."""
        self.make_room(None)
        view = self._view = self._views.view(self.layouts)
        self._backend.begin_step(view.offsets)
        for layer in self.layers:
            layer.begin(view)
        return view

    def forward(self, model: Any, tokens: mx.array) -> Any:
        """The logits of ``model`` for ``tokens`` ``[rows, 1]``, in the step that has begun."""
        if self.graphs is None:
            return model(tokens, cache=self.model_cache)
        assert self._view is not None
        return self.graphs.forward(model, tokens, self._view)

    def end_step(self) -> None:
        """End the step after its graph is built. Every row has one token more."""
        self._view = None
        for layer in self.layers:
            layer.end()
        self.layouts.after_step()

    def drop(self) -> None:
        """Without rows, drop the buffers, so that the next row does not add to them."""
        self.layouts.drop()
        for layer in self.layers:
            layer.drop()
        if self.graphs is not None:
            self.graphs.drop()

    def close(self) -> None:
        """Drop all buffers and shared prefixes."""
        self.layouts.prefixes.clear()
        if self.graphs is not None:
            self.graphs.drop()
        self.layers.clear()
        self.model_cache.clear()

    def check(self) -> None:
        """Raise AssertionError unless layouts and buffers agree."""
        self.layouts.check()
        for layer, layout in zip(self.layers, self.layouts.of(self._windows), strict=True):
            if layout.rows:  # else the next row makes new buffers
                layer.check(layout.rows, layout.capacity)

    def _move(self, moves: Sequence[Move]) -> None:
        """Copy rows to their new slots, after the layouts have changed.

        The copies of some layers are made, computed and written, then those of the next. So they
        take no more than one layer, or than one row.
        """
        if not moves:
            return
        self._before_computing()
        rows = RowMoves(moves)
        copied: list[tuple[SlotLayer, list[mx.array]]] = []
        room = most = self._most_copied()
        for layer in self.layers:
            copies = layer.copies(rows)
            num_bytes = sum(copy.nbytes for copy in copies)
            if copied and num_bytes > room:
                written = _written(rows, copied)
                mx.eval(written)  # it frees the copies
                room = most
            copied.append((layer, copies))
            room -= num_bytes
        _written(rows, copied)  # and the next step computes that

    def _most_copied(self) -> int:
        """Bytes of the largest layer, or of one row in all of them if these are more."""
        rows = max(1, self.layouts.main.rows)
        sizes = [layer.nbytes for layer in self.layers]
        return max(*sizes, sum(sizes) // rows)

    def _relayout(self, changes: Changes) -> None:
        """Rebuild buffers one layer at a time, so that only one layer is ever held twice."""
        if not changes:
            return
        self._before_computing()
        for layer, kind in zip(self.layers, self._kinds, strict=True):
            change = changes.get(kind.window)
            if change is not None:
                layer.relayout(change)
                mx.eval(layer.arrays)


def _written(rows: RowMoves, copied: list[tuple[SlotLayer, list[mx.array]]]) -> list[mx.array]:
    """Move the copies of some layers to their places. Returns the layers' buffers, lazily."""
    mx.eval([copies for _, copies in copied])  # a buffer that is still to be read would be copied
    found = []
    for layer, copies in copied:
        layer.move(rows, copies)
        found += layer.arrays
    copied.clear()
    return found
