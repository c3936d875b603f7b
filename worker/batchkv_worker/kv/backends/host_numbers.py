"""Numbers that the host gives to kernels of the device."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

_LEAST = 4  # of 4 bytes


def host_numbers(numbers: Sequence[int]) -> mx.array:
    """``numbers`` as int32 ``[len(numbers)]``, so that a GPU reads them from memory of its own.

    On CUDA, MLX has arrays of at most 8 bytes in memory of the host, and a kernel crosses the bus
    to read them: an H200 took 16 to 24 µs more for a kernel that reads one such number. Arrays of
    more bytes come over once. So a few numbers are the first ones of a larger array.
    """
    count = len(numbers)
    if count >= _LEAST:
        return mx.array(numbers, mx.int32)
    return mx.array([*numbers, *[0] * (_LEAST - count)], mx.int32)[:count]
