"""A decode step that was built and not read yet, and the input tokens of the next one."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from batchkv_worker.engine.tokens.sampling import Sampled
from batchkv_worker.sequence import Sequence


@dataclass(slots=True)
class Step:
    """A decode step: its rows by slot, and the tokens that it samples."""

    rows: list[Sequence | None]
    sampled: Sampled


def inputs(rows: list[Sequence | None], in_flight: Step | None) -> mx.array:
    """Input tokens ``[rows]``: those that the step in flight samples, else each row's last one."""
    known = [0 if row is None else (row.generated or row.prompt)[-1] for row in rows]
    before = in_flight.rows if in_flight else []
    slots = {id(row): place for place, row in enumerate(before) if row is not None}
    places = [-1 if row is None else slots.get(id(row), -1) for row in rows]
    if in_flight is None or all(place < 0 for place in places):
        return mx.array(known)
    previous = in_flight.sampled.tokens.astype(mx.int32)
    if places == list(range(previous.shape[0])):
        return previous
    gathered = mx.take(previous, mx.array([max(0, place) for place in places]))
    return mx.where(mx.array(places) >= 0, gathered, mx.array(known))
