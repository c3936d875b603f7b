"""When buffers grow, shift or shrink, and by how much. Plain Python: decisions about a layout.

A rebuilt buffer is copied as a whole, so a rebuild also drops the columns on the left that no row
owns. Buffers grow by half and shift only when a quarter is free, so that copying is amortized. When
``max_cells`` (rows times columns) leaves no room for that, they grow by less, and in the end shift
by the few columns that are free. ``NoRoom``: even this is not enough, and a row has to leave.
"""

from __future__ import annotations

from typing import Protocol

from batchkv_worker.kv.slots.changes import Demand, Move, Relayout

STEP = 256  # capacities are multiples of this


class Columns(Protocol):
    """The parts of a layout that these decisions read (``layout.SlotLayout`` describes them)."""

    window: int | None
    rows: int
    capacity: int
    write: int

    @property
    def num_rows(self) -> int: ...

    @property
    def lowest(self) -> int: ...

    @property
    def last_end(self) -> int: ...

    @property
    def ceiling(self) -> int | None: ...

    def rows_for(self, count: int, /) -> int: ...

    def rebuilt(self, rows: int, capacity: int, shift: int, /) -> Relayout: ...


class NoRoom(Exception):
    """The buffers would take more than they may. They have not been changed.

    ``move``: a row that was moved to another slot before.
    """

    def __init__(self, move: Move | None = None) -> None:
        super().__init__("no room")
        self.move = move


def round_up(value: int, step: int = STEP) -> int:
    """The smallest multiple of ``step`` that holds ``value``."""
    return -(-value // step) * step


def before_step(layout: Columns, max_cells: int | None) -> Relayout | None:
    """The change after which the write column exists; raises NoRoom."""
    if layout.write < layout.capacity:
        return None
    low, rows, capacity = layout.lowest, layout.rows, layout.capacity
    used, end = layout.write - low, layout.last_end - low
    is_free = layout.window is not None or low >= capacity // 4
    if low >= STEP and (is_free or end <= capacity):
        return layout.rebuilt(rows, capacity, -low)
    wanted = round_up(min(capacity * 3 // 2, end))
    if layout.ceiling is not None:
        wanted = min(wanted, layout.ceiling)
    wanted = max(wanted, capacity + STEP)
    if max_cells is not None:
        wanted = min(wanted, max_cells // rows // STEP * STEP)
    if wanted > capacity:
        return layout.rebuilt(rows, wanted, -low)
    if used < capacity and low:
        return layout.rebuilt(rows, capacity, -low)
    raise NoRoom


def before_join(
    layout: Columns, demand: Demand, slot: int, wanted_rows: int | None, max_cells: int | None
) -> Relayout | None:
    """The change that makes room in ``slot`` for a row, and for one step after; raises NoRoom.

    ``demand``: the row's demand on this layout. ``wanted_rows``: the number of rows that the
    buffers must have; None leaves it to the layout. Other rows must be in the slots.
    """
    rows = wanted_rows or max(layout.rows, layout.rows_for(slot + 1))
    low = layout.lowest
    shift = max(0, demand.length - layout.write)
    capacity = max(layout.capacity, round_up(layout.write + shift + 1))
    if low >= STEP and capacity > layout.capacity:  # rather than grow, drop columns without owner
        shift = max(demand.length - layout.write, -low)
        capacity = max(layout.capacity, round_up(layout.write + shift + 1))
    if max_cells is not None and rows * capacity > max_cells:
        shift = max(demand.length - layout.write, -low)
        capacity = round_up(layout.write + shift + 1)
        if wanted_rows is None and rows * capacity > max_cells:
            rows = max(slot + 1, layout.num_rows)
        if rows * capacity > max_cells:
            raise NoRoom
    return layout.rebuilt(rows, capacity, shift)


def fits(lengths: list[int], most_remaining: int, max_cells: int) -> bool:
    """Whether rows of these lengths have room for some steps once no slot between them is free."""
    columns = round_up(max(lengths, default=0) + max(1, min(most_remaining, STEP)))
    return len(lengths) * columns <= max_cells
