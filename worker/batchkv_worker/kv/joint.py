"""One product with the weights of several linear layers, and whether it is faster than theirs."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from batchkv_worker import blas
from batchkv_worker.kv import narrow
from batchkv_worker.kv.timing import least_time

_MARGIN = 1.1  # by which one product has to be faster
_TIMES = 8  # products that are timed together
_ARRAYS = ("weight", "scales", "biases", "bias")  # with a line for each output

Product = Callable[[mx.array], list[mx.array]]  # of an input: what each of the layers answers
Whole = dict[str, mx.array]


@dataclass(frozen=True, slots=True)
class Likeness:
    """What layers must have in common to be multiplied at once.

    ``dtype`` is that of their inputs; ``packing`` has the bits, group size and mode of quantized
    weights.
    """

    kind: type[nn.Module]
    inputs: int
    dtype: mx.Dtype
    has_bias: bool
    packing: tuple[int, int, str] | None = None


def likeness_of(module: Any, x: mx.array) -> Likeness:
    """Of a linear layer that is given ``x``."""
    size = x.shape[-1]
    if isinstance(module, nn.QuantizedLinear):
        packing = (module.bits, module.group_size, module.mode)
        return Likeness(type(module), size, x.dtype, "bias" in module, packing)
    return Likeness(type(module), size, x.dtype, "bias" in module)


def outputs_of(module: Any) -> int:
    """How many numbers a linear layer answers for a row."""
    return int(module.weight.shape[0])


def whole_of(family: Sequence[Any]) -> Whole:
    """What the layers hold, put together: the lines of one after those of another."""
    first = family[0]
    names = [name for name in _ARRAYS if first.get(name) is not None]
    whole = {name: mx.concatenate([module[name] for module in family]) for name in names}
    mx.eval(whole)
    return whole


def product_of(family: Sequence[Any], whole: Whole, rows: int) -> Product:
    """What computes all parts at once."""
    first, bias = family[0], whole.get("bias")
    if isinstance(first, narrow.NarrowLinear):
        return _narrow_product(family, whole, rows)
    ends = list(accumulate(map(outputs_of, family)))[:-1]
    weight = whole["weight"]
    packed = {name: whole.get(name) for name in ("scales", "biases")}
    if isinstance(first, nn.QuantizedLinear):
        packed |= {"group_size": first.group_size, "bits": first.bits, "mode": first.mode}
    else:
        weight = weight.T

    def product(x: mx.array) -> list[mx.array]:
        is_dense = packed["scales"] is None
        found = x @ weight if is_dense else mx.quantized_matmul(x, weight, **packed)
        return _split(found if bias is None else found + bias, ends, axis=-1)

    return product


def _split(found: mx.array, ends: list[int], axis: int) -> list[mx.array]:
    parts: list[mx.array] = mx.split(found, ends, axis=axis)
    return parts


def _narrow_product(family: Sequence[Any], whole: Whole, rows: int) -> Product:
    """The same in blocks of one size, none of which belongs to two layers."""
    outputs = [outputs_of(module) for module in family]
    weight, bias = whole["weight"], whole.get("bias")
    columns = narrow.columns_of(math.gcd(*outputs), weight.shape[1], rows)
    assert columns is not None  # each has a multiple of the same few columns
    blocks = narrow.in_blocks(weight, columns)
    mx.eval(blocks)
    ends = [end // columns for end in accumulate(outputs)][:-1]
    if bias is not None:
        bias = bias.reshape(-1, 1, columns)

    def product(x: mx.array) -> list[mx.array]:
        found = x.reshape(x.size // x.shape[-1], x.shape[-1]) @ blocks
        parts = _split(found if bias is None else found + bias, ends, axis=0)
        return [
            part.swapaxes(0, 1).reshape(*x.shape[:-1], size)
            for part, size in zip(parts, outputs, strict=True)
        ]

    return product


@cache
def is_faster(like: Likeness, outputs: tuple[int, ...], rows: int) -> bool:
    """Whether one product of ``rows`` rows is, for layers with so many outputs each.

    Measured once a shape, as it will be in a step, beside which Python builds the next one.
    """
    family = [_sample(like, size, rows) for size in outputs]
    product = product_of(family, whole_of(family), rows)
    x = mx.random.normal((rows, 1, like.inputs)).astype(like.dtype)
    mx.eval(x, [module.parameters() for module in family])

    # Whoever asked reads the parts, wherever they lie.
    def apart() -> mx.array:
        return mx.concatenate([module(x) for module in family], axis=-1)

    def at_once() -> mx.array:
        return mx.concatenate(product(x), axis=-1)

    with blas.threads(max(1, (os.cpu_count() or 1) - 1)):
        alone, together = (least_time(run, times=_TIMES) for run in (apart, at_once))
    return alone is not None and together is not None and alone > together * _MARGIN


def _sample(like: Likeness, outputs: int, rows: int) -> Any:
    """A layer of that kind with weights that mean nothing."""
    module: Any
    if like.packing is None:
        module = nn.Linear(like.inputs, outputs, like.has_bias)
    else:
        bits, group_size, mode = like.packing
        module = nn.QuantizedLinear(like.inputs, outputs, like.has_bias, group_size, bits, mode)
    module.set_dtype(like.dtype)
    if like.kind is narrow.NarrowLinear:
        columns = narrow.columns_of(outputs, like.inputs, rows)
        assert columns is not None  # it has some in the layer that this is a sample of
        narrow.make_narrow(module, columns, rows)
    return module
