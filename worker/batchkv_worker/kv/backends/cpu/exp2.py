"""Powers of two of float32 numbers, on CPUs where MLX has no fast exponential.

MLX's CPU backend is not vectorized on x86: an exponential takes about 16 ns there, a power 5.
Additions, products and shifts are loops that compilers vectorize. A power that is made of those
takes about 2 ns: the whole part of a number becomes the bits of an exponent, and a polynomial
computes the rest.
"""

from __future__ import annotations

import math
from functools import cache, partial

import mlx.core as mx

from batchkv_worker.kv.backends.timing import gain

LOG2_E = math.log2(math.e)
LOWEST, HIGHEST = -126.0, 128.0  # what the bits of an exponent can hold; the highest is infinity
_MARGIN = 1.5  # how many times as fast powers must be: they read the numbers more often

# Added to a number and subtracted again, this leaves the whole number next to it: float32 has no
# bits for more there.
_ROUNDER = 1.5 * 2**23
_MANTISSA_BITS = 23
_EXPONENT_BIAS = 127
# 2 to the x for x within half of zero, to 1e-7: fitted to 4,000 Chebyshev points.
_TERMS = (
    1.0,
    0.6931472067106216,
    0.24022651213595086,
    0.05550327214207754,
    0.009618025602947586,
    0.0013400432165829137,
    0.0001546973198152048,
)


@cache
def is_faster() -> bool:
    """Whether ``exp2`` beats MLX's exponential on this device, in float32.

    Measured once: a few milliseconds, and a second for the compiler where it is the first.
    """
    numbers = -mx.random.uniform(0, 20, (128, 256))
    mx.eval(numbers)
    return gain(lambda: mx.exp(numbers), lambda: exp2(numbers)) > _MARGIN


def exp2(x: mx.array) -> mx.array:
    """2 to the ``x``, float32 between ``LOWEST`` and ``HIGHEST``, to a relative 2e-7.

    Infinite from 127.5 on.
    """
    return fraction(x) * whole(x)


def whole(x: mx.array) -> mx.array:
    """2 to the whole number next to ``x``."""
    return mx.view(_whole_bits(x), mx.float32)


# Two kernels: one kernel with two results is not vectorized by the compiler.
@partial(mx.compile, shapeless=True)
def fraction(x: mx.array) -> mx.array:
    """2 to the difference of ``x`` and the whole number next to it."""
    rest = x - ((x + _ROUNDER) - _ROUNDER)
    found = rest * _TERMS[-1] + _TERMS[-2]
    for term in reversed(_TERMS[:-2]):
        found = found * rest + term
    return found


@partial(mx.compile, shapeless=True)
def _whole_bits(x: mx.array) -> mx.array:
    number = ((x + _ROUNDER) - _ROUNDER).astype(mx.int32)
    return mx.left_shift(number + _EXPONENT_BIAS, _MANTISSA_BITS)
