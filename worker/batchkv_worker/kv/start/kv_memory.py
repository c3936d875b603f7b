"""How much memory keys and values of a loaded model get on this machine."""

from __future__ import annotations

import logging

import mlx.core as mx

from batchkv_cache_store.opening import parse_tiers
from batchkv_worker.errors import ModelError
from batchkv_worker.kv.backends.device import memory_facts
from batchkv_worker.kv.backends.memory_budget import MemoryFacts, ModelFacts, plan_memory
from batchkv_worker.kv.layers.discover import AttentionShape, CacheTree
from batchkv_worker.kv.schemes.packing import LayerScheme, fit_model
from batchkv_worker.kv.schemes.spec import SchemeSpec

log = logging.getLogger("batchkv.device")


def read_facts(cache: str | None) -> MemoryFacts:
    """The facts of this machine, to be read before a model is loaded.

    ``cache`` is the text of the worker's cache tiers: one of them may be this process's own memory.
    """
    specs = parse_tiers(cache) if cache else ()
    return memory_facts(sum(spec.max_bytes or 0 for spec in specs if spec.kind == "memory"))


def choose_memory(
    name: str,
    facts: MemoryFacts,
    weight_bytes: int,
    tree: CacheTree,
    scheme: str,
    dtype: mx.Dtype,
    wanted: int | None = None,
) -> int:
    """Bytes for keys and values: ``wanted``, or the rest of the machine's memory.

    If that is little, a warning is logged. Raises ModelError for a model that is too large for the
    device, unless ``wanted`` is set.
    """
    if wanted:
        return wanted
    plan = plan_memory(facts, ModelFacts(weight_bytes, dense_share(tree, scheme, dtype)))
    if plan.is_hopeless:
        raise ModelError(f"model {name!r} is too large for this machine: {plan.problem}")
    if plan.problem:
        log.warning("%s", plan.problem)
    return plan.kv_bytes


def dense_share(tree: CacheTree, scheme: str, dtype: mx.Dtype) -> float:
    """Bytes of a dense copy of the largest packed layer for each byte that all layers keep.

    Of the layers that keep every token, if there are any: the others keep few.
    """
    try:
        fitted = fit_model(SchemeSpec.parse(scheme), tree.shapes)
    except ValueError:
        return 0.0  # the engine refuses it when it is built, with the reason
    leaves = [leaf for leaf in tree.leaves if isinstance(leaf, AttentionShape)]
    pairs = list(zip(leaves, fitted, strict=True))
    layers = [layer for leaf, layer in pairs if leaf.window is None] or [one for _, one in pairs]
    kept = sum(layer.bytes_per_token(dtype.size) for layer in layers)
    dense = max((_dense_bytes(layer, dtype) for layer in layers if layer.is_packed), default=0)
    return dense / kept if kept else 0.0


def _dense_bytes(layer: LayerScheme, dtype: mx.Dtype) -> int:
    """Bytes of one token of a layer, unpacked."""
    shape = layer.shape
    return int(shape.num_heads * (shape.key_size + shape.value_size) * dtype.size)
