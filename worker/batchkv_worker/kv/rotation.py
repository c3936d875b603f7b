"""A fixed orthonormal rotation of the head dimension.

Keys of trained models have a few channels that are many times larger than the rest, and the scale
of a group is set by its largest number. A rotation spreads each channel over all of them; what is
left looks Gaussian, whatever went in. Scores do not change when queries are rotated alike, and the
output of attention, a sum of rotated values, is rotated back once per query.

Sizes that are powers of two take random signs and a Hadamard transform (size * log2(size)
additions); other sizes multiply by an explicit matrix. MLX's transform knows 12, 20 and 28 times
a power of two as well, but its matrices of order 20 and 28 are not symmetric, so that it cannot
undo itself there, and for sizes that it does not know at all its CPU kernel writes past its
buffer instead of raising (MLX 0.32.4, size 72). Hence no other size ever reaches it.

Signs and matrices depend on the size alone and never change: packed keys outlive the process.
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import numpy as np

_SEED = 20250428  # part of what packed data means


def rotate(x: mx.array) -> mx.array:
    """``x @ R`` along the last axis, computed in float32; shape and dtype stay.

    R is orthonormal: lengths and dot products of equally rotated vectors stay, beyond rounding.
    """
    size = x.shape[-1]
    if _is_power_of_two(size):
        return mx.hadamard_transform(x * _signs(size)).astype(x.dtype)
    return (x.astype(mx.float32) @ _matrix(size)).astype(x.dtype)


def unrotate(x: mx.array) -> mx.array:
    """Undo ``rotate``: ``x @ R.T`` along the last axis; shape and dtype stay."""
    size = x.shape[-1]
    if _is_power_of_two(size):
        return (mx.hadamard_transform(x.astype(mx.float32)) * _signs(size)).astype(x.dtype)
    return (x.astype(mx.float32) @ _matrix(size).T).astype(x.dtype)


def _is_power_of_two(size: int) -> bool:
    return size & (size - 1) == 0


@cache
def _signs(size: int) -> mx.array:
    # RandomState's streams are frozen across NumPy versions; default_rng's are not.
    bits = np.random.RandomState(_SEED).randint(0, 2, size)
    return mx.array((2 * bits - 1).astype(np.float32))


@cache
def _matrix(size: int) -> mx.array:
    """A matrix drawn evenly from all orthonormal ones: QR of a Gaussian, with R's diagonal > 0."""
    gaussian = np.random.RandomState(_SEED).standard_normal((size, size))
    orthonormal, upper = np.linalg.qr(gaussian)
    return mx.array((orthonormal * np.sign(np.diag(upper))).astype(np.float32))
