"""Whether one kernel packs chunks of prompts as MLX's operations do, and is faster.

Blocks are shared between machines, and a row that finds its prefix must get the answer of one that
computed it. So the parts must be the same, and the numbers that are given back, too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from batchkv_worker.kv.attention.paths import LayerAttention
from batchkv_worker.kv.backends.contract import ChunkKernels
from batchkv_worker.kv.backends.timing import gain
from batchkv_worker.kv.kernels.launch import Input, View
from batchkv_worker.kv.kernels.plain import PlainChunks
from batchkv_worker.kv.types import PackedKV

log = logging.getLogger("batchkv.engine")

ROWS, TOKENS = 4, 256  # of the chunk that is compared, and timed
_MORE_ROWS, _MORE_TOKENS = 8, 320  # with pads
_BEFORE = 65  # tokens of a prefix
_MANY_ROWS = 8  # of the larger chunk that is timed
_MARGIN = 1.02  # by which the kernel has to be faster
_LEAST = 0.98  # how many times as fast it must be in a larger chunk
_REPEATS = 15
_LAYERS = 8  # that are timed together


def are_better(kernels: ChunkKernels, layer: LayerAttention) -> bool:
    """Whether ``kernels`` give the same for such a layer in each of their forms, and sooner.

    ``layer`` reads packed parts. Raises what MLX raises for what the device refuses.
    """
    plain = PlainChunks(layer.scheme, layer.dtype)
    keys, values = _numbers(layer, ROWS, TOKENS)
    in_turn = mx.contiguous(values.swapaxes(1, 2)).swapaxes(1, 2)  # as models have them
    prefixes = [plain.pack(*_numbers(layer, rows, _BEFORE)) for rows in (1, ROWS)]
    mx.eval(in_turn, prefixes)
    forms = _results(plain, keys, in_turn, prefixes), _results(kernels, keys, in_turn, prefixes)
    if not all(_equal(wanted, found) for wanted, found in zip(*forms, strict=True)):
        log.warning("one kernel packs chunks of %s differently: it is not used", layer.scheme)
        return False

    gains = [_gain(plain, kernels, layer, rows) for rows in (ROWS, _MANY_ROWS)]
    log.debug("chunks: one kernel packs %.2f and %.2f times as fast", *gains)
    return gains[0] > _MARGIN and gains[1] > _LEAST


def _gain(plain: ChunkKernels, kernels: ChunkKernels, layer: LayerAttention, rows: int) -> float:
    """How many times as long ``plain`` takes for a chunk of so many rows.

    Each layer packs what the one before gave back, as in a model each needs the one before: a
    device would compute others at the same time.
    """
    keys, values = _numbers(layer, rows, TOKENS)
    in_turn = mx.contiguous(values.swapaxes(1, 2)).swapaxes(1, 2)
    mx.eval(in_turn)

    def packed_by(way: ChunkKernels) -> list[mx.array]:
        found, given = [], keys
        for _ in range(_LAYERS):
            packed, dense = way.pack_and_give(given, in_turn, None, rows, TOKENS)
            found += _flat((packed, dense))
            given = dense[0]
        return found

    return gain(partial(packed_by, plain), partial(packed_by, kernels), _REPEATS)


def _results(
    way: ChunkKernels, keys: mx.array, values: mx.array, prefixes: Sequence[PackedKV]
) -> Iterator[list[mx.array]]:
    """Of each form: packed alone, with pads, behind prefixes; values as they are, and as a view."""
    for given in (values, _view(values)):
        yield _flat(way.pack(keys, given))
        yield _flat(way.pack_and_give(keys, given, None, _MORE_ROWS, _MORE_TOKENS))
        for prefix in prefixes:
            yield _flat(way.pack_and_give(keys, given, prefix, _MORE_ROWS, TOKENS))


def _view(values: mx.array) -> Input:
    """Values as a part of a product that also gave as much before them."""
    rows, heads, tokens, size = values.shape
    lines = values.swapaxes(1, 2).reshape(rows, tokens, heads * size)
    whole = mx.concatenate([lines + 1, lines], axis=-1)
    step = 2 * heads * size
    array = whole[..., heads * size :].reshape(rows, tokens, heads, size).swapaxes(1, 2)
    return View(array, whole, heads * size, (tokens * step, size, step, 1))


def _numbers(layer: LayerAttention, rows: int, tokens: int) -> tuple[mx.array, mx.array]:
    """Keys and values; some of their tokens have ties, one sign, one number, or zeros alone."""
    shape, found = layer.scheme.shape, []
    for size in (shape.key_size, shape.value_size):
        plain = mx.random.normal((rows, shape.num_heads, tokens, size))
        kinds = [plain, mx.round(4 * plain) / 4, mx.abs(plain) + 1, -mx.abs(plain) - 1]
        kinds += [300 * plain, plain / 1000, mx.full(plain.shape, -2.5), mx.zeros(plain.shape)]
        kind = (mx.arange(tokens) % len(kinds)).reshape(1, 1, tokens, 1)
        mixed = kinds[0]
        for number, one in enumerate(kinds):
            mixed = mx.where(kind == number, one, mixed)
        found.append(mixed.astype(layer.dtype))
    mx.eval(found)
    return found[0], found[1]


def _flat(results: Any) -> list[mx.array]:
    """The arrays in nested tuples, in order."""
    if isinstance(results, mx.array):
        return [results]
    return [array for one in results for array in _flat(one)]


def _equal(wanted: Sequence[mx.array], found: Sequence[mx.array]) -> bool:
    """Whether all numbers are the same."""
    return all(
        one.dtype == other.dtype and bool(mx.array_equal(one, other).item())
        for one, other in zip(wanted, found, strict=True)
    )
