"""Keys and values in which a fault of attention shows, and plain attention over them in float32.

Values show where an error comes from: each run of columns has a number of its own in the output, so
that a few missing columns show among thousands. Cells that no row may read are NaN: a free slot,
and columns before and after the visible ones. Columns that a mask hides hold large numbers, as a
former row may have left them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import mlx.core as mx

from batchkv_worker.faults import is_device_fault
from batchkv_worker.kv.attention.paths import LayerAttention
from batchkv_worker.kv.attention.records import bounds_of, place_rows
from batchkv_worker.kv.types import PackedKV, Parts

SPARE = 64  # columns of a buffer before and after those that are read
_PERIOD = 509  # tokens after which the noise repeats: no multiple of any block of a kernel
_NOISE = 0.1  # added to the values, whose main part identifies their columns
_HIDDEN_KEYS, _HIDDEN_VALUES = 8.0, 100.0


@cache
def _computes_on_cpu() -> bool:
    """Whether this build of MLX computes on the CPU beside the device that serves."""
    try:
        with mx.stream(mx.cpu):
            packed = mx.quantize(mx.ones((1, 64)))
            mx.eval(mx.dequantize(*packed) @ mx.ones((64, 1)))
    except (ValueError, RuntimeError) as fault:
        if is_device_fault(fault):
            raise
        return False
    return True


def on_cpu() -> AbstractContextManager[Any]:
    """Inside, MLX computes on the CPU, whose kernels are not those that are checked.

    Where it cannot, plain products of the device itself are what others are compared with.
    """
    return mx.stream(mx.cpu) if _computes_on_cpu() else nullcontext()


class Tokens:
    """Random keys and values of ``rows`` rows, as slots keep them: columns of a longer buffer.

    ``columns`` of ``buffers`` are read; ``exact`` has the same in float32, ``[rows, kv heads,
    columns, size]``. A row's columns before its own of ``firsts`` are hidden. With ``has_free`` the
    last row is a free slot.
    """

    def __init__(
        self, layer: LayerAttention, columns: int, *, firsts: Sequence[int], has_free: bool = False,
        gain: float = 1.0,
    ) -> None:  # fmt: skip
        scheme, shape = layer.scheme, layer.scheme.shape
        rows = len(firsts)
        place = mx.arange(columns + 2 * SPARE).reshape(1, 1, -1, 1) - SPARE
        row = mx.arange(rows).reshape(-1, 1, 1, 1)
        hidden = place < mx.array(firsts).reshape(-1, 1, 1, 1)
        outside = (place < 0) | (place >= columns) | (mx.array(has_free) & (row == rows - 1))
        noise = normal((rows, shape.num_heads, _PERIOD, shape.key_size + shape.value_size))
        noise = noise[:, :, mx.arange(place.size) % _PERIOD]
        keys, values = mx.split(noise, [shape.key_size], axis=-1)
        run = -(-columns // shape.value_size)  # columns that have a number in the output together
        marks = (place // run) == mx.arange(shape.value_size)
        values = gain * (marks + _NOISE * values)
        keys = mx.where(hidden, _HIDDEN_KEYS * keys, keys).astype(layer.dtype)
        values = mx.where(hidden, _HIDDEN_VALUES * values, values).astype(layer.dtype)
        self.columns = slice(SPARE, SPARE + columns)
        ends = [SPARE + columns] * rows
        if has_free:
            ends[-1] = SPARE + firsts[-1]
        self.bounds = bounds_of([SPARE + first for first in firsts], ends)
        self.buffers: PackedKV = (
            _spoilt(scheme.keys.pack(keys), outside),
            _spoilt(scheme.values.pack(values), outside),
        )
        mx.eval(self.buffers)
        stored_keys, stored_values = self.parts(rows - has_free)
        with on_cpu():
            self.exact = (
                scheme.keys.unpack(stored_keys, mx.float32),
                scheme.values.unpack(stored_values, mx.float32),
            )

    def parts(self, rows: int) -> PackedKV:
        """The visible columns of the first rows."""
        return sliced(self.buffers, rows, self.columns)

    def records(self, layer: LayerAttention) -> mx.array:
        """The buffers as slots of the path ``kernel`` have them when rows of a group come in."""
        rows, _, columns, _ = self.buffers[0][0].shape
        places = tuple((row, 0, columns, 0) for row in range(rows))
        return place_rows(layer, places, *self.buffers, columns)


def _spoilt(parts: Parts, outside: mx.array) -> Parts:
    """Parts that hold NaN, to be put where no row may read."""
    return tuple(mx.where(outside, _no_number(part.dtype), part) for part in parts)


def _no_number(dtype: mx.Dtype) -> mx.array:
    """NaN, the highest code, or a scale that is no number."""
    if mx.issubdtype(dtype, mx.floating):
        return mx.array(float("nan"), dtype)
    return mx.array(mx.iinfo(dtype).max, dtype)


def normal(shape: tuple[int, ...]) -> mx.array:
    """The same numbers at each start."""
    return mx.random.normal(shape, key=mx.random.key(sum(shape)))


def sliced(buffers: PackedKV, rows: int, columns: slice) -> PackedKV:
    keys, values = (tuple(part[:rows, ..., columns, :] for part in parts) for parts in buffers)
    return keys, values


def exact_attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, seen: mx.array
) -> mx.array:
    """Attention in float32 by plain products on the CPU, in the shape of ``paths.attend``.

    ``seen`` is bool, ``[rows or 1, 1, tokens or 1, columns]``.
    """
    with on_cpu():
        rows, heads, num_tokens, size = queries.shape
        folded = queries.astype(mx.float32).reshape(rows, keys.shape[1], -1, size)
        scores = scale * (folded @ keys.swapaxes(-1, -2))
        split = scores.reshape(rows, heads, num_tokens, -1)
        weights = mx.softmax(mx.where(seen, split, -mx.inf), axis=-1).reshape(scores.shape)
        found = (weights @ values).reshape(rows, heads, num_tokens, values.shape[-1])
        mx.eval(found)
    return found
