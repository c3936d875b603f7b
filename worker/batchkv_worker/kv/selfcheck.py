"""Before any job: does this model give in a batch what it gives alone?

Models differ in what they do with a cache: some compute attention themselves and broadcast a mask
their own way, some want positions as one number. What the layers' types do not tell shows here, on
a few tokens: a model that disagrees with itself is refused rather than wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from batchkv_worker.errors import ModelError
from batchkv_worker.kv.attention import Path
from batchkv_worker.kv.layout import Demand, SlotLayout
from batchkv_worker.kv.prefill import PrefillCache
from batchkv_worker.kv.schemes import LayerScheme
from batchkv_worker.kv.slots import Frame, SlotCache

LENGTHS = (3, 7, 5, 2)  # ragged, so that a row that reads another's columns shows
TOLERANCE = 0.1  # of the largest logit: half precision stays far below, a wrong mask far above


def check(
    name: str, model: Any, schemes: Sequence[LayerScheme], path: Path, dtype: mx.Dtype
) -> None:
    """Raise ModelError when the model does not give in a batch what it gives alone."""
    try:
        found = disagreement(model, schemes, path, dtype)
    except Exception as fault:  # model code may raise anything
        reason = f"{type(fault).__name__}: {fault}"[:300]
        raise ModelError(
            f"model {name!r} cannot decode several rows at once ({reason}); not served"
        ) from fault
    if not found <= TOLERANCE:
        raise ModelError(
            f"model {name!r} gives other logits in a batch than alone (by {found:.0%} of the "
            "largest): its attention treats the batch's mask in a way of its own; not served"
        )


def disagreement(model: Any, schemes: Sequence[LayerScheme], path: Path, dtype: mx.Dtype) -> float:
    """Largest difference of a row's logits in a batch and alone, over the largest logit.

    The worst over batches of two rows, of as many as a layer has heads, and of four: shapes that
    happen to be equal are where a mask broadcasts along the wrong axis.
    """
    heads = schemes[0].shape.num_heads
    worst = 0.0
    for count in sorted({2, min(heads, len(LENGTHS)), len(LENGTHS)}):
        rows = [[1 + (5 * i + j) % 17 for j in range(LENGTHS[i] + 1)] for i in range(count)]
        together = _logits(model, schemes, path, dtype, rows)
        for index, row in enumerate(rows):
            alone = _logits(model, schemes, path, dtype, [row])[0]
            scale = mx.maximum(mx.abs(alone).max(), 1e-6)
            worst = max(worst, float((mx.abs(together[index] - alone).max() / scale).item()))
    return worst


def _logits(
    model: Any,
    schemes: Sequence[LayerScheme],
    path: Path,
    dtype: mx.Dtype,
    rows: list[list[int]],
) -> mx.array:
    """Logits after each row's last token: ragged prefill of the others, then one decode step."""
    width = max(map(len, rows)) - 1
    prefill = [PrefillCache(scheme, width) for scheme in schemes]
    model(mx.array([(row[:-1] + [0] * width)[:width] for row in rows]), cache=prefill)
    layout = SlotLayout(len(rows))
    slots = [SlotCache(scheme, path, dtype) for scheme in schemes]
    for index, row in enumerate(rows):
        place, change = layout.admit(Demand(len(row) - 1, 1))
        for slot, source in zip(slots, prefill, strict=True):
            if change is not None:
                slot.relayout(change)
            slot.admit(place, layout.write, *source.row(index, len(row) - 1))
    frame = Frame.of(layout)
    for slot in slots:
        slot.frame = frame
    logits = model(mx.array([[row[-1]] for row in rows]), cache=slots)[:, -1]
    return logits.astype(mx.float32)
