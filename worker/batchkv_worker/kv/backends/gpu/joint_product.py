"""One product with the weights of several linear layers; measures whether it is faster."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from batchkv_worker.kv.backends.compare import are_close
from batchkv_worker.kv.backends.timing import gain, least_times

log = logging.getLogger("batchkv.engine")

_MARGIN = 1.1  # by which one product has to be faster: some layers copy their part first
_TIMES = 8  # products that are timed together
_LONGEST = 4.0  # milliseconds: where products take longer, launching them does not matter
_ARRAYS = ("weight", "scales", "biases", "bias")  # with a row for each output

MAX_WEIGHTS = 2**26  # of a group; a gate and its input have 50 million at 4 billion in all

Whole = dict[str, mx.array]


@dataclass(frozen=True, slots=True)
class Product:
    """``multiply`` gives the outputs of all layers for an input, one layer's after another's.

    The outputs of a layer end at one of ``ends``, those of the last with the array.
    """

    multiply: Callable[[mx.array], mx.array]
    ends: tuple[int, ...]

    def __call__(self, x: mx.array) -> list[mx.array]:
        return self.parts(self.multiply(x))

    def parts(self, found: mx.array) -> list[mx.array]:
        """The outputs of each layer: views."""
        parts: list[mx.array] = mx.split(found, list(self.ends), axis=-1)
        return parts


@dataclass(frozen=True, slots=True)
class LayerSignature:
    """The properties that layers must have in common to be multiplied at once.

    ``dtype``: of their inputs. ``dtypes``: of their arrays, by name. ``packing``: the bits, group
    size and mode of quantized weights.
    """

    kind: type[nn.Module]
    inputs: int
    dtype: mx.Dtype
    dtypes: tuple[tuple[str, mx.Dtype], ...]
    packing: tuple[int, int, str] | None = None

    @property
    def has_bias(self) -> bool:
        """Whether the layers have a bias."""
        return "bias" in dict(self.dtypes)


def signature_of(module: Any, x: mx.array) -> LayerSignature:
    """The properties of a linear layer with the input ``x``."""
    held = {name: module.get(name) for name in _ARRAYS}
    dtypes = tuple((name, array.dtype) for name, array in held.items() if array is not None)
    packing = None
    if isinstance(module, nn.QuantizedLinear):
        packing = (module.bits, module.group_size, module.mode)
    return LayerSignature(type(module), x.shape[-1], x.dtype, dtypes, packing)


def outputs_of(module: Any) -> int:
    """The number of outputs of a linear layer for a row."""
    return int(module.weight.shape[0])


def whole_of(group: Sequence[Any]) -> Whole:
    """The layers' arrays joined: the rows of one layer after those of another."""
    first = group[0]
    names = [name for name in _ARRAYS if first.get(name) is not None]
    whole = {name: mx.concatenate([module[name] for module in group]) for name in names}
    mx.eval(whole)
    return whole


def product_of(group: Sequence[Any], whole: Whole) -> Product:
    """The outputs of all layers at once."""
    first, bias = group[0], whole.get("bias")
    ends = tuple(accumulate(map(outputs_of, group)))[:-1]
    weight = whole["weight"]
    packed = {name: whole.get(name) for name in ("scales", "biases")}
    if isinstance(first, nn.QuantizedLinear):
        packed |= {"group_size": first.group_size, "bits": first.bits, "mode": first.mode}
    else:
        weight = weight.T

    def multiply(x: mx.array) -> mx.array:
        is_dense = packed["scales"] is None
        found = x @ weight if is_dense else mx.quantized_matmul(x, weight, **packed)
        return found if bias is None else found + bias

    return Product(multiply, ends)


@cache
def is_faster(like: LayerSignature, outputs: tuple[int, ...], rows: int) -> bool:
    """Whether one product is faster for layers of so many outputs, and gives the same results.

    This is measured once for each shape and number of rows. It is False for weights so large that
    launches do not matter.
    """
    if like.inputs * sum(outputs) > MAX_WEIGHTS:
        return False
    group = [_sample(like, size) for size in outputs]
    product = product_of(group, whole_of(group))
    x = mx.random.normal((rows, 1, like.inputs)).astype(like.dtype)
    mx.eval(x, [module.parameters() for module in group])

    # Each layer reads its part, which is a view of the whole.
    def apart() -> list[mx.array]:
        return [module(x) + 1 for module in group]

    def at_once() -> list[mx.array]:
        return [part + 1 for part in product(x)]

    (once,) = least_times([apart], repeats=1)
    if once is None or once > _LONGEST:
        return False
    won = gain(apart, at_once, times=_TIMES)
    log.debug("layers of %s are %.2f times as fast at once", outputs, won)
    return won > _MARGIN and all(
        are_close(*parts) for parts in zip(apart(), at_once(), strict=True)
    )


def _sample(like: LayerSignature, outputs: int) -> Any:
    """A layer of that kind with arbitrary weights."""
    module: Any
    if like.packing is None:
        module = nn.Linear(like.inputs, outputs, like.has_bias)
    else:
        bits, group_size, mode = like.packing
        module = nn.QuantizedLinear(like.inputs, outputs, like.has_bias, group_size, bits, mode)
    module.set_dtype(like.dtype)
    return module
