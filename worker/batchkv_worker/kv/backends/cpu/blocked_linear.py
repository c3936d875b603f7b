"""Products of a few rows with a model's weights, on CPUs: without packing the weights each time.

A BLAS packs both sides of a product before it multiplies. For the few rows of a decode step that
costs as much as multiplying, at every step anew. OpenBLAS has kernels for small products that read
both sides as they lie. So weights are kept a second time in blocks of so few columns that each
block's product is a small one. This takes memory, so only small models do it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from batchkv_worker.kv.backends import blas
from batchkv_worker.kv.backends.contract import Undo
from batchkv_worker.kv.backends.rebind import swap_class, undo_all
from batchkv_worker.kv.backends.timing import gain

log = logging.getLogger("batchkv.engine")

MAX_SMALL = 10**6  # multiplications of a product that OpenBLAS counts as small
MAX_BYTES = 64 * 2**20  # of all blocks: no memory limit counts them
_MULTIPLE = 16  # columns: a block of fewer is not worth its call
_MARGIN = 1.1  # by which blocks have to be faster
_TIMES = 8  # products that are timed together


class BlockedLinear(nn.Linear):  # type: ignore[misc]  # MLX does not say what its layers are
    """An ``nn.Linear`` that has ``_blocks`` for inputs of up to ``_rows`` rows.

    An underscore keeps them out of the module's parameters.
    """

    _blocks: mx.array  # [blocks, inputs, columns of one]
    _rows: int

    def __call__(self, x: mx.array) -> mx.array:
        if x.size > self._rows * x.shape[-1]:
            plain: mx.array = super().__call__(x)
            return plain
        found = product(x, self._blocks)
        return found + self["bias"] if "bias" in self else found


class BlockedEmbedding(nn.Embedding):  # type: ignore[misc]
    """The same for an embedding that is also the head of its model."""

    _blocks: mx.array
    _rows: int

    def as_linear(self, x: mx.array) -> mx.array:
        if x.size > self._rows * x.shape[-1]:
            plain: mx.array = super().as_linear(x)
            return plain
        return product(x, self._blocks)


_BLOCKED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: BlockedLinear,
    nn.Embedding: BlockedEmbedding,
}


def product(x: mx.array, blocks: mx.array) -> mx.array:
    """``x`` ``[..., inputs]`` times the weights of ``in_blocks``: ``[..., outputs]``."""
    count, _, columns = blocks.shape
    lines = x.reshape(x.size // x.shape[-1], x.shape[-1])
    return (lines @ blocks).swapaxes(0, 1).reshape(*x.shape[:-1], count * columns)


def columns_of(outputs: int, inputs: int, rows: int) -> int | None:
    """Columns of a block: as many as a small product can have, in blocks of one size; or None."""
    most = min(outputs, MAX_SMALL // (rows * inputs)) // _MULTIPLE * _MULTIPLE
    fitting = (n for n in range(most, 0, -_MULTIPLE) if outputs % n == 0)
    return next(fitting, None)


def in_blocks(weight: mx.array, columns: int) -> mx.array:
    """``weight`` ``[outputs, inputs]`` as ``[blocks, inputs, columns]``."""
    outputs, inputs = weight.shape
    return mx.contiguous(weight.reshape(outputs // columns, columns, inputs).swapaxes(-1, -2))


@dataclass(frozen=True)
class BlockLinears:
    """Layers of a model keep blocks, too, for up to ``rows`` rows; ``columns`` by layer's name."""

    columns: Mapping[str, int]
    rows: int

    def install(self, model: Any) -> Undo:
        undos, num_bytes = [], 0
        layers = dict(model.named_modules())
        for name, columns in self.columns.items():
            layer = layers[name]
            blocks = in_blocks(layer.weight, columns)
            mx.eval(blocks)
            kind = _BLOCKED[type(layer)]
            undos.append(swap_class(layer, kind, _blocks=blocks, _rows=self.rows))
            num_bytes += blocks.nbytes
        log.info(
            "weights of %.1f MB are kept in blocks, too, for steps of %d rows",
            *(num_bytes / 1e6, self.rows),
        )
        return undo_all(undos)


def choose(model: Any, dtype: mx.Dtype, rows: int, *, measure: bool = True) -> BlockLinears | None:
    """The layers whose weights to keep in blocks for up to ``rows`` rows: where those are faster.

    Without ``measure``, all that can. None where OpenBLAS does not serve, or no layer gains.
    """
    if measure and not blas.is_openblas():
        return None
    found: dict[str, int] = {}
    seen: set[int] = set()
    num_bytes = 0
    for name, layer in model.named_modules():
        if id(layer) in seen or type(layer) not in _BLOCKED or layer.weight.dtype != dtype:
            continue
        seen.add(id(layer))
        if type(layer) is nn.Embedding and not _is_tied(model):
            continue
        outputs, inputs = layer.weight.shape
        columns = columns_of(outputs, inputs, rows)
        if columns is None or num_bytes + layer.weight.nbytes > MAX_BYTES:
            continue
        if measure and not is_faster(outputs, inputs, columns, rows):
            continue
        found[name] = columns
        num_bytes += layer.weight.nbytes
    return BlockLinears(found, rows) if found else None


def _is_tied(model: Any) -> bool:
    """Whether the model's embedding is also its head."""
    return bool(getattr(getattr(model, "args", None), "tie_word_embeddings", False))


@cache
def is_faster(outputs: int, inputs: int, columns: int, rows: int) -> bool:
    """Measured once a shape, as in a step: Python builds the next one on a core of its own."""
    x, weight = mx.random.normal((rows, inputs)), mx.random.normal((outputs, inputs))
    blocks = in_blocks(weight, columns)
    mx.eval(x, weight, blocks)
    with blas.threads(max(1, (os.cpu_count() or 1) - 1)):
        return gain(lambda: x @ weight.T, lambda: product(x, blocks), times=_TIMES) > _MARGIN
