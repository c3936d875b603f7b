"""Whether two ways to compute the same agree, and how far rounding lets them differ."""

from __future__ import annotations

import re
from collections.abc import Mapping

import mlx.core as mx

CLOSE = 0.05  # of the largest number: rounding errors are smaller, those of a wrong product larger

# Shares of the largest number that rounding alone explains in attention. Scores and weights are
# rounded to the dtype: by 2^-9 of themselves in bfloat16, 2^-12 in float16.
_PATH_TOLERANCES = {mx.float32: 0.002, mx.float16: 0.02, mx.bfloat16: 0.05}
_ROUNDED_PATH_TOLERANCE = 0.02  # of float32 whose products are rounded: like float16

# Shares of the largest logit by which a model in a batch may differ from the model alone. In
# float32 only the order of additions differs, unless products are rounded.
_EXACT = 0.005
_ROUNDED_EXACT = 0.02
_HALF = 0.1

# The first of their makers whose matrix units take 10 bits of a float32's mantissa (TF32).
_FIRST_APPLE_GPU, _FIRST_CUDA = 17, 80


def are_close(one: mx.array, other: mx.array) -> bool:
    """Whether they differ by no more than rounding explains."""
    return difference(one, other) <= CLOSE


def difference(wanted: mx.array, found: mx.array) -> float:
    """The largest difference, over the largest number wanted; infinite where one is no number."""
    wanted, found = wanted.astype(mx.float32), found.astype(mx.float32)
    share = (mx.abs(wanted - found).max() / mx.maximum(mx.abs(wanted).max(), 1e-30)).item()
    return float("inf") if share != share else float(share)


def rounds_float32(architecture: str, environ: Mapping[str, str]) -> bool:
    """Whether a GPU multiplies float32 numbers with 10 bits of their mantissas, as MLX does there.

    ``architecture`` is MLX's name for it: ``applegpu_g17s``, ``sm_90``. ``MLX_ENABLE_TF32=0`` asks
    for exact products.
    """
    asked = re.match(r"\s*[+-]?0*[1-9]", environ.get("MLX_ENABLE_TF32", "1"))  # as C reads a number
    if not asked:
        return False
    for pattern, first in ((r"applegpu_g(\d+)", _FIRST_APPLE_GPU), (r"sm_(\d+)", _FIRST_CUDA)):
        if named := re.match(pattern, architecture):
            return int(named[1]) >= first
    return False


def path_tolerance(dtype: mx.Dtype, *, is_rounded: bool) -> float:
    """How far attention may be from a float32 product, as a share of its largest number.

    ``is_rounded``: see ``rounds_float32``.
    """
    if dtype == mx.float32 and is_rounded:
        return _ROUNDED_PATH_TOLERANCE
    return _PATH_TOLERANCES[dtype]


def model_tolerance(dtype: mx.Dtype, *, is_rounded: bool) -> float:
    """How far a model on plain caches may differ in a batch, as a share of the largest logit."""
    if dtype != mx.float32:
        return _HALF
    return _ROUNDED_EXACT if is_rounded else _EXACT
