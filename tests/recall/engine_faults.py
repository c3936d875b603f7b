"""Faults that are planted in the engine's caches, to see that answers show them.

Assumed of the engine, here and nowhere else in this folder: ``Engine._slots.fill_group(rows,
layers)`` copies the rows of a group into slots when prompts are done (no prompt here shares a
prefix), and each of the group's layers gives a row's pieces, one layer for each of
``Engine.plan.kinds``, time at axis -2 unless the kind has a state. ``Engine._rows`` has rows by
slot. ``Engine._slots._views.view(layouts)`` makes each step's view, with ``offsets``, and ``spans``
by window, whose ``_starts`` are the rows' first columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from batchkv_worker.engine.engine import Engine
from batchkv_worker.kv.slots.changes import Arrivals
from batchkv_worker.kv.slots.step_view import StepView
from batchkv_worker.kv.types import Pieces
from batchkv_worker.sequence import Sequence
from recall.through_engine import Cases

Change = Callable[[Sequence, list[Pieces]], list[Pieces]]


def _at_handover(running: Engine, change: Change) -> None:
    """From now on rows go into their slots as `change` leaves them."""
    slots = running._slots

    def changed(rows: Arrivals, group: Any) -> None:
        for one in rows.rows:
            assert one.length
            pieces = [layer.row(one.place, one.length, one.shared) for layer in group]
            slots.fill(one.slot, change(running._rows[one.slot], pieces))

    slots.fill_group = changed  # type: ignore[method-assign]


def _at_each_step(running: Engine, change: Callable[[StepView], StepView]) -> None:
    views = running._slots._views
    frame_of = views.view
    views.view = lambda layouts: change(frame_of(layouts))  # type: ignore[method-assign]


def drop_a_source(running: Engine, cases: Cases) -> None:
    """Of one token of the prompt that the answer needs, nothing gets into any slot."""

    def change(row: Sequence, pieces: list[Pieces]) -> list[Pieces]:
        case = cases[row.job_id]
        back = row.num_prefill - case.sources[len(case.answer) // 2]
        return [
            layer if kind.has_state else tuple(_blanked(part, back) for part in layer)
            for kind, layer in zip(running.plan.kinds, pieces, strict=True)
        ]

    _at_handover(running, change)


def _blanked(part: mx.array, back: int) -> mx.array:
    """Zeros at the token so many places before the end, unless it has left the window."""
    columns = part.shape[-2]
    is_kept = mx.arange(columns) != columns - back
    return mx.where(is_kept[:, None], part, mx.zeros((), part.dtype))


def take_a_neighbours_tokens(running: Engine, cases: Cases) -> None:
    """Rows get the keys and values of the row before them; their states are their own."""
    before: list[list[Pieces]] = []

    def change(row: Sequence, pieces: list[Pieces]) -> list[Pieces]:
        before.append(pieces)
        other = before[-2:][0]  # the first row has nobody before it
        return [
            own if kind.has_state else tuple(map(_fitted, theirs, own))
            for kind, theirs, own in zip(running.plan.kinds, other, pieces, strict=True)
        ]

    _at_handover(running, change)


def _fitted(theirs: mx.array, own: mx.array) -> mx.array:
    """The last columns of `theirs`, as many as `own` has; what is missing there is `own`'s."""
    count = min(theirs.shape[-2], own.shape[-2])
    head, tail = own[..., : own.shape[-2] - count, :], theirs[..., theirs.shape[-2] - count :, :]
    return mx.concatenate([head, tail], axis=-2)


def zero_states(running: Engine, cases: Cases) -> None:
    """States are lost between the prompt and the first decode step."""

    def change(row: Sequence, pieces: list[Pieces]) -> list[Pieces]:
        return [
            tuple(map(mx.zeros_like, layer)) if kind.has_state else layer
            for kind, layer in zip(running.plan.kinds, pieces, strict=True)
        ]

    _at_handover(running, change)


def hurry_offsets(running: Engine, cases: Cases) -> None:
    """Every token that is decoded stands one position too far."""
    _at_each_step(running, lambda view: dataclasses.replace(view, offsets=view.offsets + 1))


def lag_offsets(running: Engine, cases: Cases) -> None:
    """Every token that is decoded stands one position short: the first shares another's."""
    _at_each_step(running, lambda view: dataclasses.replace(view, offsets=view.offsets - 1))


def narrow_windows(running: Engine, cases: Cases) -> None:
    """While decoding, every window is one token too narrow."""

    def change(view: StepView) -> StepView:
        for window, span in view.spans.items():
            if window is not None:
                first = span.write - window + 2
                span._starts = [max(start, first) for start in span._starts]
        return view

    _at_each_step(running, change)
