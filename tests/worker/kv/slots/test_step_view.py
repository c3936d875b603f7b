"""Which columns a step's groups of rows read, and which of them are masked."""

from __future__ import annotations

import mlx.core as mx

from batchkv_worker.kv.slots.changes import Demand
from batchkv_worker.kv.slots.layout import SlotLayout
from batchkv_worker.kv.slots.step_view import ColumnSpan, Shapes


def test_a_group_has_a_mask_only_if_its_rows_differ_in_length() -> None:
    """Rows of one length see all columns that their group reads."""
    layout = SlotLayout(4)
    lengths = (100, 90, 30, 30)
    for slot, length in enumerate(lengths):
        layout.admit(Demand(length, 10), slot)
    span = ColumnSpan(layout, 4, [2], Shapes())
    unequal, equal = span.groups
    assert equal.mask is None and equal.low == span.write - 30
    assert unequal.mask is not None and unequal.mask.dtype == mx.bool_
    assert unequal.mask.sum(axis=-1).reshape(-1).tolist() == [101, 91]
    alone = ColumnSpan(layout, 4, [], Shapes())
    (group,) = alone.exact_groups
    assert group.mask is alone.mask is not None
    assert group.mask.sum(axis=-1).reshape(-1).tolist() == [1 + length for length in lengths]
