"""Whether chunks of prompts are faster with one kernel for norms and positions.

The graph of a step is replayed, and that of a chunk is built anew. So what counts is the time from
building a layer's part to its results.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx

from batchkv_worker.kv.backends.compare import are_close
from batchkv_worker.kv.backends.gpu import joint_product
from batchkv_worker.kv.backends.gpu.fused_linear import Groups, folder_of
from batchkv_worker.kv.backends.gpu.rotary_layers import (
    OF_ATTENTION,
    Names,
    frequencies_of,
    turn_of,
)
from batchkv_worker.kv.backends.host_numbers import host_numbers
from batchkv_worker.kv.backends.timing import gain
from batchkv_worker.kv.kernels.launch import Input, Launch, View
from batchkv_worker.kv.kernels.rotary import RotaryKernel

log = logging.getLogger("batchkv.engine")

ROWS, TOKENS = 4, 256  # of the chunk that is timed
POSITION = 512  # of its first token
_MARGIN = 1.02  # by which one kernel has to be faster
_TIMES = 8  # layers that are timed together


def are_faster(model: Any, layers: Sequence[Names], groups: Groups, launch: Launch) -> bool:
    """Whether chunks are faster with the kernel in the first of these ``layers``, and the same.

    All of them are measured by the first one. The product that gives its queries, keys and values
    is part of the comparison; without such a product, chunks are left as they are.
    """
    modules = dict(model.named_modules())
    query, key, rope = layers[0]
    attention = folder_of(query)
    linears = next(
        (one for one in groups if len(one) == OF_ATTENTION and folder_of(one[0]) == attention), None
    )
    if linears is None:
        log.debug("chunks: no product gives queries and keys of %s", attention)
        return False
    norms = modules[query], modules[key]
    part = _Part(norms, modules[rope], [modules[name] for name in linears])
    apart, at_once = part.apart, part.at_once_by(RotaryKernel(launch))
    won = gain(apart, at_once, times=_TIMES)
    log.debug("chunks: norms and positions are %.2f times as fast by one kernel", won)
    return won > _MARGIN and all(map(are_close, apart(), at_once()))


class _Part:
    """A layer's part from its input to turned queries, turned keys, and values in one piece."""

    def __init__(self, norms: tuple[Any, Any], rope: Any, linears: Sequence[Any]) -> None:
        self.norms, self.rope, self.linears = norms, rope, linears
        first = linears[0]
        dtype = norms[0].weight.dtype
        self._size = int(norms[0].weight.size)
        inputs = first.scales.shape[-1] * first.group_size if "scales" in first else None
        self._x = mx.random.normal((ROWS, TOKENS, inputs or first.weight.shape[-1])).astype(dtype)
        mx.eval(self._x)

    def apart(self) -> list[mx.array]:
        """As the model computes it."""
        heads = [self._in_heads(linear(self._x)) for linear in self.linears]
        turned = [
            self.rope(norm(x).transpose(0, 2, 1, 3), offset=POSITION)
            for norm, x in zip(self.norms, heads, strict=False)
        ]
        return [*turned, _in_one_piece(heads[-1])]

    def at_once_by(self, kernel: RotaryKernel) -> Any:
        """By one product and the kernel."""
        whole = joint_product.whole_of(self.linears)
        product = joint_product.product_of(self.linears, whole)
        turn, frequencies = turn_of(self.norms, self.rope), frequencies_of(self.rope)
        weights = self.norms[0].weight, self.norms[1].weight
        offsets = host_numbers([POSITION] * ROWS)
        ends = list(accumulate(map(joint_product.outputs_of, self.linears)))
        step, size = ends[-1], self._size
        mx.eval(frequencies, offsets)

        def at_once() -> list[mx.array]:
            found = product.multiply(self._x)
            heads = [self._in_heads(part) for part in product.parts(found)]
            strides = TOKENS * step, step, size, 1
            views: list[Input] = [
                View(one, found, start, strides)
                for one, start in zip(heads, (0, ends[0]), strict=False)
            ]
            turned = kernel(turn, views[0], views[1], weights, frequencies, offsets)
            return [*turned, _in_one_piece(heads[-1])]

        return at_once

    def _in_heads(self, x: mx.array) -> mx.array:
        return x.reshape(ROWS, TOKENS, -1, self._size)


def _in_one_piece(values: mx.array) -> mx.array:
    """As they are packed, or stored."""
    return mx.contiguous(values.transpose(0, 2, 1, 3))
