"""What a step's groups of rows are told of the columns that they see."""

from __future__ import annotations

import mlx.core as mx
import pytest

from batchkv_worker.kv.backends.cpu.softmax import Exp2Softmax
from batchkv_worker.kv.backends.softmax import HIDDEN, MLX_SOFTMAX
from batchkv_worker.kv.slots.changes import Demand
from batchkv_worker.kv.slots.layout import SlotLayout
from batchkv_worker.kv.slots.step_view import ColumnSpan, Shapes


def test_masks_of_groups_may_be_what_is_added_to_scores() -> None:
    """Models still see a mask as they know it; rows that see all have none."""
    layout = SlotLayout(4)
    for slot, length in enumerate((100, 90, 30, 30)):
        layout.admit(Demand(length, 10), slot)
    chosen, added = (
        ColumnSpan(layout, 4, [2], Shapes(softmax=softmax))
        for softmax in (MLX_SOFTMAX, Exp2Softmax())
    )
    assert chosen.groups[1].mask is None and added.groups[1].mask is None
    seen, hidden = chosen.groups[0].mask, added.groups[0].mask
    assert seen is not None and hidden is not None
    assert hidden.dtype == mx.float32
    assert mx.array_equal(hidden == 0, seen).item()
    assert hidden.min().item() == pytest.approx(HIDDEN)
    assert added.mask is not None and added.mask.dtype == mx.bool_
    alone = ColumnSpan(layout, 4, [], Shapes(softmax=Exp2Softmax()))
    assert alone.exact_groups[0].mask is not None and alone.mask is not None
    assert alone.exact_groups[0].mask.dtype == mx.float32 and alone.mask.dtype == mx.bool_
