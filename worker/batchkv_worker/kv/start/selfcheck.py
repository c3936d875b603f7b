"""The self-check before any job: compares a model's logits in a batch with those of single rows.

Models use caches in different ways. Some compute attention themselves and broadcast a mask in their
own way, some ignore a row's length, some need positions as one number. The classes of the caches do
not show this. So the model is run on a few tokens: on its own caches, one row at a time, and on
batchkv's, several rows at once. The first way of serving it that agrees is used. If none does,
the model is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from batchkv_worker.errors import ModelError
from batchkv_worker.faults import is_device_fault
from batchkv_worker.kv.backends.compare import model_tolerance
from batchkv_worker.kv.backends.contract import Backend
from batchkv_worker.kv.backends.measurements import Codec
from batchkv_worker.kv.layers.contract import Chunk, LayerKind
from batchkv_worker.kv.layers.decode import DecodeSlots
from batchkv_worker.kv.layers.discover import CacheTree
from batchkv_worker.kv.layers.prefill_rows import PrefillRows
from batchkv_worker.kv.slots.changes import Demand
from batchkv_worker.kv.slots.step_view import Shapes
from batchkv_worker.kv.start.machine import is_rounded

log = logging.getLogger("batchkv.engine")

LENGTHS = (3, 7, 5, 2)  # ragged, so that a row that reads another's columns shows
REPLAY_COLUMNS = 64
STEPS = 2  # decode steps: a state that is not carried on shows in the second
# A share of the largest logit. A wrong mask is far above it, half precision and codes at the edge
# of a bin below. In float32 on plain caches nothing may differ but the order of additions (see
# ``compare.model_tolerance``): a state that takes little notice of pads is wrong too.
TOLERANCE = 0.1


@dataclass(frozen=True, slots=True)
class Traits:
    """How a model can be served.

    ``ragged``: prompts of unequal length may share a chunk. ``mask_rank``: axes of a decode mask.
    """

    ragged: bool = True
    mask_rank: int = 4


def _traits_from_json(value: Any) -> Traits:
    found = Traits(value["ragged"], value["mask_rank"])
    if found not in _WAYS or type(found.ragged) is not bool:
        raise ValueError(f"no model is served as {found}")
    return found


TRAITS: Codec[Traits] = Codec(
    lambda traits: {"ragged": traits.ragged, "mask_rank": traits.mask_rank}, _traits_from_json
)

_WAYS = (Traits(True, 4), Traits(False, 4), Traits(True, 5), Traits(False, 5))


def find_traits(
    backend: Backend,
    name: str,
    model: Any,
    tree: CacheTree,
    exact: Sequence[LayerKind],
    kinds: Sequence[LayerKind],
    dtype: mx.Dtype,
) -> Traits:
    """How ``model`` can be served; raises ModelError when it cannot.

    ``exact`` are its layers with keys and values as they are, which must give what the model's own
    caches give; ``kinds`` those that will serve, which must give in a batch what they give alone.
    ``dtype`` is the model's.
    """
    reasons = []
    is_overflow = False
    tolerance = model_tolerance(dtype, is_rounded=is_rounded())
    for way in _WAYS:
        try:
            found = plain = disagreement(backend, model, tree, exact, way, None)
            if plain <= tolerance:
                found = disagreement(backend, model, tree, kinds, way, kinds)
        except Exception as fault:  # model code may raise anything
            if is_device_fault(fault):
                raise
            reasons.append(f"{type(fault).__name__}: {fault}"[:200])
            continue
        if plain <= tolerance and found <= TOLERANCE:
            return way
        is_overflow |= dtype == mx.float16 and max(plain, found) == float("inf")
        reasons.append(f"logits differ by {max(plain, found):.1%} of the largest")
    if is_overflow:
        raise ModelError(
            f"model {name!r} computes numbers too large for float16: use --dtype bfloat16 or "
            "float32"
        )
    raise ModelError(
        f"model {name!r} gives something else in a batch than alone ({reasons[0]}); not served"
    )


def warn_of(name: str, traits: Traits) -> None:
    """Log which features are not used for a model."""
    if traits != Traits():
        log.warning(
            "model %s: %s",
            name,
            "prompts of unequal length are not computed together"
            if not traits.ragged
            else "it folds its query heads itself; decode masks have five axes",
        )


def disagreement(
    backend: Backend,
    model: Any,
    tree: CacheTree,
    kinds: Sequence[LayerKind],
    traits: Traits,
    alone: Sequence[LayerKind] | None,
) -> float:
    """Largest difference of a row's logits in a batch and alone, over the largest logit.

    Alone it runs on the ``alone`` kinds, or on the model's own caches for None. The worst over
    batches of two rows, of as many as a layer has heads, and of four: shapes that happen to be
    equal are where a mask broadcasts along the wrong axis.
    """
    heads = min((shape.num_heads for shape in tree.shapes), default=2)
    worst = 0.0
    for count in sorted({2, min(max(heads, 2), len(LENGTHS)), len(LENGTHS)}):
        rows = [[1 + (5 * i + j) % 17 for j in range(n + STEPS)] for i, n in enumerate(LENGTHS)]
        rows = rows[:count]
        together = logits_of(backend, model, tree, kinds, traits, rows)
        expected = [
            _own_logits(model, row)
            if alone is None
            else logits_of(backend, model, tree, alone, traits, [row])[0]
            for row in rows
        ]
        worst = max(worst, worst_difference(together, expected))
    return worst


def worst_difference(found: mx.array, expected: Sequence[mx.array]) -> float:
    """The largest difference of any row, over its largest logit; infinite for no number."""
    worst = 0.0
    for row, other in zip(found, expected, strict=True):
        difference = mx.abs(row - other).max() / mx.maximum(mx.abs(other).max(), 1e-6)
        if difference.item() != difference.item():  # not a number: never equal
            return float("inf")
        worst = max(worst, float(difference.item()))
    return worst


def _own_logits(model: Any, row: list[int]) -> mx.array:
    """Logits of the last ``STEPS`` tokens of one row on the model's own caches."""
    cache = make_prompt_cache(model)
    model(mx.array([row[:-STEPS]]), cache=cache)
    found = [model(mx.array([[token]]), cache=cache)[0, -1] for token in row[-STEPS:]]
    return mx.stack(found).astype(mx.float32)


def logits_of(
    backend: Backend,
    model: Any,
    tree: CacheTree,
    kinds: Sequence[LayerKind],
    traits: Traits,
    rows: list[list[int]],
    steps: int = STEPS,
    *,
    replays: bool = False,
) -> mx.array:
    """Of the rows' last ``steps`` tokens on our caches, together: ``[rows, steps, vocabulary]``.

    ``replays``: the graph of a step is used again, for which columns are rounded and all rows are
    one group. RuntimeError where that does not happen.
    """
    shapes = Shapes(group_cost=1, mask_rank=traits.mask_rank)
    if replays:
        columns = max(REPLAY_COLUMNS, backend.columns_multiple)
        shapes = replace(shapes, step=columns, group_cost=2**20)
    slots = DecodeSlots(backend, kinds, tree, len(rows), shapes, replays=replays)
    places: dict[int, int] = {}  # row by slot
    groups = [list(range(len(rows)))] if traits.ragged else [[i] for i in range(len(rows))]
    for group in groups:
        lengths = tuple(len(rows[i]) - steps for i in group)
        width = max(lengths)
        prefill = PrefillRows(backend, kinds, width, width)
        ragged = any(length != width for length in lengths)
        prefill.begin(Chunk(0, width, lengths if ragged else None))
        tokens = [(rows[i][:-steps] + [0] * width)[:width] for i in group]
        model(mx.array(tokens), cache=tree.nested(prefill.layers))
        prefill.end()
        for place, index in enumerate(group):
            length = lengths[place]
            slot, move = slots.admit(Demand(length, steps), prefill.row(place, length))
            if move is not None:
                places[move.target] = places.pop(move.source)
            places[slot] = index
    logits = logits_in(model, slots, rows, places, steps)
    if replays and not (slots.graphs and slots.graphs.num_replayed):
        raise RuntimeError("no graph of a step was used again")
    return logits


def logits_in(
    model: Any,
    slots: DecodeSlots,
    rows: list[list[int]],
    places: dict[int, int],
    steps: int = STEPS,
) -> mx.array:
    """Decode the last ``steps`` tokens of rows that are in slots; ``places``: row by slot."""
    found = []
    for step in range(steps):
        frame = slots.begin_step()
        inputs = [[rows[places[slot]][step - steps]] for slot in range(frame.num_rows)]
        logits = slots.forward(model, mx.array(inputs))[:, -1]
        slots.end_step()
        mx.eval(logits, slots.arrays)
        found.append(logits)
    order = sorted(places, key=lambda slot: places[slot])
    return mx.stack(found, axis=1)[mx.array(order)].astype(mx.float32)
