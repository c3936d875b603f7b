"""Products of a few rows with a model's weights, on CPUs: without packing the weights each time.

A BLAS packs both sides of a product before it multiplies. For the few rows of a decode step that
costs as much as multiplying, at every step anew. OpenBLAS has kernels for small products that read
both sides as they lie; so weights are kept a second time in blocks of so few columns that each
block's product is a small one, as long as that takes little memory: it is meant for small models.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from batchkv_worker.kv.backends import blas
from batchkv_worker.kv.backends.device import is_float32_on_cpu
from batchkv_worker.kv.backends.timing import gain

log = logging.getLogger("batchkv.engine")

MAX_SMALL = 10**6  # multiplications of a product that OpenBLAS counts as small
MAX_BYTES = 64 * 2**20  # of all blocks: nobody reckons with them
_MULTIPLE = 16  # columns: a block of fewer is not worth its call
_MARGIN = 1.1  # by which blocks have to be faster
_TIMES = 8  # products that are timed together


class NarrowLinear(nn.Linear):  # type: ignore[misc]  # MLX does not say what its layers are
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


class NarrowEmbedding(nn.Embedding):  # type: ignore[misc]
    """The same for an embedding that is also the head of its model."""

    _blocks: mx.array
    _rows: int

    def as_linear(self, x: mx.array) -> mx.array:
        if x.size > self._rows * x.shape[-1]:
            plain: mx.array = super().as_linear(x)
            return plain
        return product(x, self._blocks)


_NARROW: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: NarrowLinear,
    nn.Embedding: NarrowEmbedding,
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


def install(model: Any, dtype: mx.Dtype, rows: int) -> int:
    """Keep the model's weights in blocks, too, for up to ``rows`` rows, where those are faster.

    Returns how many bytes they take. What was decided for the model before is forgotten.
    """
    forget(model)
    if not (is_float32_on_cpu(dtype) and blas.is_openblas()):
        return 0
    found = 0
    for module in model.modules():
        kind = _NARROW.get(type(module))
        if kind is None or module.weight.dtype != dtype:
            continue
        if kind is NarrowEmbedding and not _is_tied(model):
            continue
        outputs, inputs = module.weight.shape
        columns = columns_of(outputs, inputs, rows)
        if columns is None or found + module.weight.nbytes > MAX_BYTES:
            continue
        if not _is_faster(outputs, inputs, columns, rows):
            continue
        module._blocks, module._rows = in_blocks(module.weight, columns), rows
        mx.eval(module._blocks)
        module.__class__ = kind
        found += module._blocks.nbytes
    if found:
        log.info(
            "weights of %.1f MB are kept in blocks, too, for steps of %d rows", found / 1e6, rows
        )
    return found


def _is_tied(model: Any) -> bool:
    """Whether the model's embedding is also its head."""
    return bool(getattr(getattr(model, "args", None), "tie_word_embeddings", False))


def forget(model: Any) -> None:
    """Let every layer of the model multiply with its weights as they are."""
    for module in model.modules():
        for plain, narrow in _NARROW.items():
            if type(module) is narrow:
                module.__class__ = plain
                del module._blocks, module._rows


@cache
def _is_faster(outputs: int, inputs: int, columns: int, rows: int) -> bool:
    """Measured once a shape, as it will be in a step, beside which Python builds the next one."""
    x, weight = mx.random.normal((rows, inputs)), mx.random.normal((outputs, inputs))
    blocks = in_blocks(weight, columns)
    mx.eval(x, weight, blocks)
    with blas.threads(max(1, (os.cpu_count() or 1) - 1)):
        return gain(lambda: x @ weight.T, lambda: product(x, blocks), times=_TIMES) > _MARGIN
