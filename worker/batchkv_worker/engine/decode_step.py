"""A decode step between being built and being read: its rows, and the tokens that feed the next."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from batchkv_worker.engine.tokens.sampling import Sampled
from batchkv_worker.sequence import Sequence


@dataclass(slots=True)
class Step:
    """A decode step that was built: its rows by slot, and what it will have sampled."""

    rows: list[Sequence | None]
    sampled: Sampled


def inputs(rows: list[Sequence | None], flying: Step | None) -> mx.array:
    """Tokens to feed, ``[rows]``: what the step in flight samples; new rows' last prompt token."""
    known = [0 if row is None else (row.generated or row.prompt)[-1] for row in rows]
    before = flying.rows if flying else []
    slots = {id(row): place for place, row in enumerate(before) if row is not None}
    places = [-1 if row is None else slots.get(id(row), -1) for row in rows]
    if flying is None or all(place < 0 for place in places):
        return mx.array(known)
    previous = flying.sampled.tokens.astype(mx.int32)
    if places == list(range(previous.shape[0])):
        return previous
    gathered = mx.take(previous, mx.array([max(0, place) for place in places]))
    return mx.where(mx.array(places) >= 0, gathered, mx.array(known))
