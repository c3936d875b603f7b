"""The largest few of many numbers, exactly, without sorting them all.

The ``count`` largest of a row lie in the ``count`` blocks whose maxima are largest. So only the
maxima are sorted, and then the numbers of those blocks. Of equal numbers, the first is the larger:
as in a stable sort of all of them.
"""

from __future__ import annotations

import math

import mlx.core as mx

from batchkv_worker.kv.kernels.draw import MOST_TOKENS

BLOCK = 64
MAX_COUNT = MOST_TOKENS  # beyond, so much of a vocabulary is left that one sort is as fast


def largest(numbers: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """Indices and values, both ``[rows, count]``, of ``numbers`` ``[rows, total]``, falling.

    ``count`` is at most ``total``.
    """
    rows, total = numbers.shape
    num_blocks = -(-total // BLOCK)
    if num_blocks <= count:
        order = mx.argsort(-numbers, axis=-1)[:, :count]
        return order, mx.take_along_axis(numbers, order, axis=-1)
    if missing := num_blocks * BLOCK - total:
        numbers = mx.pad(numbers, [(0, 0), (0, missing)], constant_values=-math.inf)
    blocks = numbers.reshape(rows, num_blocks, BLOCK)
    chosen = mx.argsort(-blocks.max(axis=-1), axis=-1)[:, :count]
    chosen = mx.sort(chosen, axis=-1)  # in the order of the numbers, so that the first stays first
    left = mx.take_along_axis(blocks, chosen[:, :, None], axis=1).reshape(rows, count * BLOCK)
    order = mx.argsort(-left, axis=-1)[:, :count]
    block = mx.take_along_axis(chosen, order // BLOCK, axis=-1)
    return block * BLOCK + order % BLOCK, mx.take_along_axis(left, order, axis=-1)
