"""The check before any job whether this model's rows may share a stored prefix.

If a model leaves attention to its caches, these add the shared prefix. If it reads keys and values
from its caches and attends itself, it would miss the prefix. A few tokens show which is the case:
rows after a shared prefix must give the same logits as alone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from batchkv_worker.faults import is_device_fault
from batchkv_worker.kv.attention.shared_prefix import SharedPrefix
from batchkv_worker.kv.backends.contract import Backend
from batchkv_worker.kv.layers.contract import Chunk, LayerKind
from batchkv_worker.kv.layers.decode import DecodeSlots
from batchkv_worker.kv.layers.discover import CacheTree
from batchkv_worker.kv.layers.kinds import AttentionKind
from batchkv_worker.kv.layers.prefill_rows import PrefillRows
from batchkv_worker.kv.slots.changes import Demand
from batchkv_worker.kv.slots.step_view import Shapes
from batchkv_worker.kv.start.selfcheck import (
    STEPS,
    TOLERANCE,
    Traits,
    logits_in,
    logits_of,
    worst_difference,
)
from batchkv_worker.kv.types import Pieces

log = logging.getLogger("batchkv.engine")

PREFIX = (9, 4, 11)
TAILS = (2, 4, 1)  # ragged; the last decode steps are STEPS tokens more


def can_share(
    backend: Backend, model: Any, tree: CacheTree, kinds: Sequence[LayerKind], traits: Traits
) -> bool:
    """Whether a prefix may be stored once for all rows that have it."""
    shared = [place for place, kind in enumerate(kinds) if _keeps_all(kind)]
    if not shared or any(_path_of(kinds[place]) is None for place in shared):
        return False
    rows = [[*PREFIX, *((7 * i + j) % 13 for j in range(n + STEPS))] for i, n in enumerate(TAILS)]
    try:
        together = _together(backend, model, tree, kinds, traits, rows, shared)
        alone = [logits_of(backend, model, tree, kinds, traits, [row])[0] for row in rows]
    except Exception as fault:  # model code may raise anything
        if is_device_fault(fault):
            raise
        log.info("rows do not share prefixes in attention: %s", fault)
        return False
    return worst_difference(together, alone) <= TOLERANCE


def _keeps_all(kind: LayerKind) -> bool:
    return kind.window is None and not kind.has_state


def _path_of(kind: LayerKind) -> str | None:
    return kind.path if isinstance(kind, AttentionKind) else None


def _together(
    backend: Backend,
    model: Any,
    tree: CacheTree,
    kinds: Sequence[LayerKind],
    traits: Traits,
    rows: list[list[int]],
    shared: list[int],
) -> mx.array:
    """Logits of each row's last tokens, ``[rows, STEPS, vocabulary]``, all with one prefix."""
    shapes = Shapes(group_cost=1, mask_rank=traits.mask_rank)
    slots = DecodeSlots(backend, kinds, tree, len(rows), shapes)
    before = PrefillRows(backend, kinds, len(PREFIX), len(PREFIX))
    before.begin(Chunk(0, len(PREFIX)))
    model(mx.array([PREFIX]), cache=tree.nested(before.layers))
    before.end()
    states = before.states(0)
    tokens = before.block(0, 0, len(PREFIX))
    prefix = slots.make_prefix(b"", len(PREFIX), {place: _some(tokens[place]) for place in shared})
    places: dict[int, int] = {}
    groups = [list(range(len(rows)))] if traits.ragged else [[i] for i in range(len(rows))]
    for group in groups:
        prefill = _behind(
            backend,
            prefix,
            kinds,
            len(group),
            [len(rows[i]) - STEPS for i in group],
            [state or token for state, token in zip(states, tokens, strict=True)],
        )
        lengths = tuple(len(rows[i]) - STEPS - len(PREFIX) for i in group)
        width = max(lengths)
        prefill.begin(Chunk(len(PREFIX), width, None if min(lengths) == width else lengths))
        chunk = [(rows[i][len(PREFIX) : -STEPS] + [0] * width)[:width] for i in group]
        model(mx.array(chunk), cache=tree.nested(prefill.layers))
        prefill.end()
        for place, index in enumerate(group):
            length = len(rows[index]) - STEPS
            demand = Demand(length, STEPS, len(PREFIX))
            slot, move = slots.admit(demand, prefill.row(place, length, len(PREFIX)), prefix)
            if move is not None:
                places[move.target] = places.pop(move.source)
            places[slot] = index
    return logits_in(model, slots, rows, places)


def _behind(
    backend: Backend,
    prefix: SharedPrefix,
    kinds: Sequence[LayerKind],
    count: int,
    lengths: list[int],
    pieces: list[Pieces | None],
) -> PrefillRows:
    """Prefill rows that start after the shared prefix; other layers get its tokens themselves."""
    rows = PrefillRows(backend, kinds, max(lengths), max(lengths))
    for place, layer in enumerate(rows.layers):
        if place in prefix.packed:
            layer.share([prefix.packed[place]], prefix.num_tokens)
            continue
        own = tuple(mx.repeat(piece, count, axis=0) for piece in _some(pieces[place]))
        first = prefix.num_tokens if kinds[place].has_state else 0
        layer.restore(own, first, prefix.num_tokens)
    return rows


def _some(pieces: Pieces | None) -> Pieces:
    assert pieces is not None
    return pieces
