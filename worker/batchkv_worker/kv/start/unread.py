"""The check before any job which dense arrays a model only hands on to the attention function.

Such arrays need not be built (``kv.layers.stand_ins``). The stand-ins hold no number, so a model
that reads one has no number among its logits. An index over tokens is never replaced: models read
it only when there are many tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from batchkv_worker.faults import is_device_fault
from batchkv_worker.kv.backends.contract import Backend
from batchkv_worker.kv.layers.contract import LayerKind
from batchkv_worker.kv.layers.discover import AttentionShape, CacheTree
from batchkv_worker.kv.layers.kinds import AttentionKind
from batchkv_worker.kv.start.selfcheck import (
    LENGTHS,
    STEPS,
    TOLERANCE,
    Traits,
    logits_of,
    worst_difference,
)

log = logging.getLogger("batchkv.engine")


def unread_kinds(tree: CacheTree, kinds: Sequence[LayerKind]) -> tuple[LayerKind, ...]:
    """The same kinds; those that attend themselves give stand-ins to the model."""
    return tuple(
        replace(kind, is_read=False)
        if isinstance(kind, AttentionKind)
        and kind.path is not None
        and not (isinstance(leaf, AttentionShape) and leaf.is_index)
        else kind
        for kind, leaf in zip(kinds, tree.leaves, strict=True)
    )


def are_unread(
    backend: Backend, model: Any, tree: CacheTree, kinds: Sequence[LayerKind], traits: Traits
) -> bool:
    """Whether ``model`` gives the same logits with stand-ins in the place of dense arrays."""
    unread = unread_kinds(tree, kinds)
    if unread == tuple(kinds):
        return False
    rows = [[2 + (3 * i + j) % 11 for j in range(n + STEPS)] for i, n in enumerate(LENGTHS)]
    try:
        wanted, found = (
            logits_of(backend, model, tree, some, traits, rows) for some in (kinds, unread)
        )
    except Exception as fault:  # model code may raise anything
        if is_device_fault(fault):
            raise
        log.info("dense keys and values are built for the model: %s", fault)
        return False
    return worst_difference(found, list(wanted)) <= TOLERANCE
