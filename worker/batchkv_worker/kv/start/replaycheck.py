"""The check before any job whether the graph of a model's decode step may be used again.

A model that decides something by the numbers of a step, or keeps something from step to step
outside its caches, would repeat the step that was traced. A few steps show this.

Another thread may launch such a model's steps and chunks (``backends/launching``). So its chunks
of prompts must be built without computing, too: a chunk that is only traced shows this.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from batchkv_worker.faults import is_device_fault
from batchkv_worker.kv.backends.compare import model_tolerance
from batchkv_worker.kv.backends.contract import Backend
from batchkv_worker.kv.backends.launching import Never
from batchkv_worker.kv.layers.contract import Chunk, LayerKind
from batchkv_worker.kv.layers.discover import CacheTree
from batchkv_worker.kv.layers.prefill_rows import PrefillRows
from batchkv_worker.kv.start.machine import is_rounded
from batchkv_worker.kv.start.selfcheck import LENGTHS, Traits, logits_of, worst_difference

log = logging.getLogger("batchkv.engine")

STEPS = 5  # the second is traced, and three follow


def can_replay(
    backend: Backend,
    model: Any,
    tree: CacheTree,
    kinds: Sequence[LayerKind],
    traits: Traits,
    dtype: mx.Dtype,
) -> bool:
    """Whether ``model`` gives the same logits by a graph that is used again."""
    rows = [[3 + (7 * i + j) % 13 for j in range(n + STEPS)] for i, n in enumerate(LENGTHS)]
    try:
        _trace_chunk(backend, model, tree, kinds)
        wanted, found = (
            logits_of(backend, model, tree, kinds, traits, rows, STEPS, replays=replays)
            for replays in (False, True)
        )
    except Exception as fault:  # model code may raise anything
        if is_device_fault(fault):
            raise
        log.info("every step is built anew: %s", fault)
        return False
    return worst_difference(found, list(wanted)) <= model_tolerance(dtype, is_rounded=is_rounded())


def _trace_chunk(backend: Backend, model: Any, tree: CacheTree, kinds: Sequence[LayerKind]) -> None:
    """Build a chunk of a prompt. MLX raises if the model computes what it is built of."""
    tokens = [3, 4, 5, 6]

    def build(given: mx.array) -> list[mx.array]:
        group = PrefillRows(backend, kinds, len(tokens), len(tokens), Never())
        group.begin(Chunk(0, len(tokens)))
        model(given, cache=tree.nested(group.layers))
        group.end()
        return group.arrays

    mx.compile(build)(mx.array([tokens]))
