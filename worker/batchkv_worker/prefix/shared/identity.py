"""Whose blocks these are: the manifest that a worker derives from the model it has loaded.

Everything that changes a key or a value beyond rounding is in it: the weights as they stand in
memory (so also an adapter, or another quantization), the configuration (so also RoPE and windows),
the KV scheme of every layer, the dtype, the block's length, and the version of how layers become
arrays. What two Macs may choose differently is not: chunks, slots, attention paths, memory.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import mlx.core as mx
from blake3 import blake3
from mlx.utils import tree_flatten

from batchkv_cache_store.blocks.block import VERSION
from batchkv_cache_store.keys import BLOCK_TOKENS, Manifest
from batchkv_worker.kv.backends.measurements import TEXT, Measurements
from batchkv_worker.kv.layers.contract import LayerKind
from batchkv_worker.kv.layers.kinds import AttentionKind
from batchkv_worker.kv.layers.state import StateKind
from batchkv_worker.kv.start.plan import KvPlan
from batchkv_worker.model.loader import LoadedModel

# Raised whenever the same model and scheme give other arrays, or other numbers in them, than
# before: blocks of the old kind are then of another namespace.
CACHE_CONTRACT = 1


def manifest(loaded: LoadedModel, plan: KvPlan) -> Manifest:
    """The manifest of what this worker computes.

    All weights are read once (gigabytes a second). A later start on the same files is spared that.
    """
    return {
        "format": VERSION,
        "contract": CACHE_CONTRACT,
        "model": type(loaded.model).__module__,
        "weights": _kept_digest(loaded, plan.backend.measurements),
        "config": config_digest(loaded.config),
        "adapter": loaded.adapter,
        "layers": [describe(kind) for kind in plan.kinds],
        "dtype": str(loaded.dtype).removeprefix("mlx.core."),
        "block_tokens": BLOCK_TOKENS,
    }


def _kept_digest(loaded: LoadedModel, measurements: Measurements) -> str:
    """``weights_digest``, read anew only if the files of the weights have changed since."""
    if not loaded.weight_files:
        return weights_digest(loaded.model)
    name = f"digest of the weights in {loaded.weight_files}"
    return measurements.of(name, lambda: weights_digest(loaded.model), TEXT)


def weights_digest(model: Any) -> str:
    """BLAKE3 of every parameter: its path, dtype, shape and numbers, in the order of the paths."""
    digest = blake3(max_threads=blake3.AUTO)
    for path, array in sorted(tree_flatten(model.parameters())):
        digest.update(f"{path} {array.dtype} {list(array.shape)}\n".encode())
        if array.size:
            # One that is no plain buffer, like a transposed one, is copied first.
            digest.update(memoryview(mx.contiguous(array)).cast("B"))
    return digest.hexdigest()


def config_digest(config: dict[str, Any]) -> str:
    """SHA-256 of a model's configuration, whatever the order of its fields."""
    text = json.dumps(config, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def describe(kind: LayerKind) -> str:
    """What a layer keeps, in one line: scheme, heads and sizes, window; or a state's arrays."""
    if isinstance(kind, AttentionKind):
        shape, window = kind.scheme.shape, kind.window or "all"
        sizes = f"{shape.num_heads}x{shape.key_size}+{shape.value_size}"
        return f"{kind.scheme} {sizes} {window} {_name(kind.dtype)}"
    assert isinstance(kind, StateKind)
    arrays = (f"{list(row)} {_name(dtype)}" for _, row, dtype in kind.shape.used)
    return " ".join(("state", *arrays))


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")
