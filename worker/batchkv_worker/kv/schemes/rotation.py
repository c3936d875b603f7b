"""A fixed orthonormal rotation of the head dimension.

Keys of trained models have a few channels that are many times larger than the others, and the
largest number of a group sets its scale. A rotation spreads each channel over all channels, so that
the result looks Gaussian for any input. Scores do not change if queries are rotated in the same
way. The output of attention, a sum of rotated values, is rotated back once per query.

The rotation is a product with an explicit matrix: a Hadamard matrix with random signs for sizes
that are powers of two, a random orthonormal one for others. One product is one kernel. Because
heads are small, it costs a decode step less than the several kernels of a fast transform. All
entries of a Hadamard matrix have one magnitude, so that half precision rounds them all alike and
leaves it orthogonal.

Matrices depend on the size only and never change, because packed keys outlive the process.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

_SEED = 20250428  # part of what packed data means


def rotate(x: mx.array, scale: float = 1.0) -> mx.array:
    """``scale * (x @ R)`` along the last axis; shape and dtype stay.

    R is orthonormal: except for rounding, lengths and dot products of rotated vectors stay.
    """
    return _times(x, False, scale)


def unrotate(x: mx.array) -> mx.array:
    """Undo ``rotate``: ``x @ R.T`` along the last axis; shape and dtype stay."""
    return _times(x, True, 1.0)


def _times(x: mx.array, transposed: bool, scale: float) -> mx.array:
    size = x.shape[-1]
    if _is_power_of_two(size):
        return x @ _matrix(size, x.dtype, transposed, scale)
    # Entries of unequal magnitude are not rounded alike: half precision would bend the basis.
    exact = x.astype(mx.float32) @ _matrix(size, mx.float32, transposed, scale)
    return exact.astype(x.dtype)


def _is_power_of_two(size: int) -> bool:
    return size & (size - 1) == 0


@lru_cache(maxsize=64)
def _matrix(size: int, dtype: mx.Dtype, transposed: bool, scale: float) -> mx.array:
    matrix = scale * (_hadamard(size) if _is_power_of_two(size) else _orthonormal(size))
    return mx.array((matrix.T if transposed else matrix).astype(np.float32)).astype(dtype)


def _hadamard(size: int) -> Any:
    """Sylvester's matrix, its rows given random signs, over the root of its size."""
    matrix = np.ones((1, 1))
    while matrix.shape[0] < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    # RandomState's streams are frozen across NumPy versions; default_rng's are not.
    signs = 2 * np.random.RandomState(_SEED).randint(0, 2, size) - 1
    return matrix * signs[:, None] / np.sqrt(size)


def _orthonormal(size: int) -> Any:
    """A matrix drawn evenly from all orthonormal ones: QR of a Gaussian, with R's diagonal > 0."""
    gaussian = np.random.RandomState(_SEED).standard_normal((size, size))
    orthonormal, upper = np.linalg.qr(gaussian)
    return orthonormal * np.sign(np.diag(upper))
