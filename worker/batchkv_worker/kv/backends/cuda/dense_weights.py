"""Weights that are packed in a model's files, and dense where the device multiplies those faster.

MLX on CUDA unpacks packed weights for each matrix of up to 64 rows. On an H200 a product of 64 rows
with 2,560 by 2,560 weights took 69 µs with 4 bits, and 26 µs dense. On an H100 a step of 64 rows of
Qwen3-4B's shape took 35 ms with 4 bits, and prompts were computed at 19,000 tokens a second. The
same numbers are multiplied: those that MLX unpacks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from math import prod
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path

from batchkv_worker.kv.backends.packed_products import size_of

log = logging.getLogger("batchkv.engine")

_KINDS = (nn.QuantizedLinear, nn.QuantizedEmbedding)


def unpack(model: Any, dtype: mx.Dtype, most_bytes: int | None) -> int:
    """Give ``model`` dense layers instead of packed ones, if it then takes at most ``most_bytes``.

    None: whatever it takes. Returns their number. Nothing is read or computed yet. Layers of
    experts stay packed, and layers of classes that others made.
    """
    packed = {id(module): module for module in model.modules() if type(module) in _KINDS}
    num_bytes = sum(prod(size_of(each)) for each in packed.values()) * dtype.size
    stays = _bytes_of([model]) - _bytes_of(packed.values())
    if not packed or (most_bytes is not None and num_bytes + stays > most_bytes):
        return 0
    dense = {key: _dense(module, dtype) for key, module in packed.items()}

    def replaced(_: str, module: Any) -> Any:
        return dense.get(id(module), module)

    leaves = model.leaf_modules()
    model.update_modules(tree_map_with_path(replaced, leaves, is_leaf=nn.Module.is_module))
    log.info(
        "%d layers with packed weights get dense ones, %.1f GB: this device multiplies them faster",
        *(len(packed), num_bytes / 1e9),
    )
    return len(packed)


def _bytes_of(modules: Iterable[Any]) -> int:
    """Of all their arrays, each counted once."""
    arrays = [array for module in modules for _, array in tree_flatten(module.parameters())]
    return sum(array.nbytes for array in {id(array): array for array in arrays}.values())


def _dense(module: Any, dtype: mx.Dtype) -> Any:
    """The same layer with the numbers that its packed weights stand for."""
    layer: Any
    outputs, inputs = size_of(module)
    if isinstance(module, nn.QuantizedLinear):
        layer = nn.Linear(inputs, outputs, bias="bias" in module)
        if "bias" in module:
            layer.bias = module.bias
    else:
        layer = nn.Embedding(outputs, inputs)
    layer.weight = mx.dequantize(
        *(module.weight, module.scales, module.get("biases")),
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
        dtype=dtype,
    )
    return layer
