"""Whether two ways to compute the same agree."""

from __future__ import annotations

import mlx.core as mx

_CLOSE = 0.05  # of the largest number: rounding stays below, a wrong product does not


def are_close(one: mx.array, other: mx.array) -> bool:
    """Whether they differ by no more than rounding explains."""
    one, other = one.astype(mx.float32), other.astype(mx.float32)
    return bool((mx.abs(one - other).max() <= _CLOSE * mx.abs(one).max()).item())
