"""The gate of a model's feed-forward layers, by powers of two where those are faster.

mlx-lm's models call one function, ``models.activations.swiglu``, by the name that each model's
module imported. It computes an exponential for each number; what that costs on a CPU and what is
done about it says ``exp2``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models import activations

from batchkv_worker.kv.backends.cpu import exp2 as powers
from batchkv_worker.kv.backends.rebind import rebind

_NAME = "swiglu"
_original = activations.swiglu


def _by_powers(gate: mx.array, x: mx.array) -> mx.array:
    scaled = _scaled(gate)
    return _gated(gate, _one_more(powers.fraction(scaled), powers.whole(scaled)), x)


@partial(mx.compile, shapeless=True)
def _scaled(gate: mx.array) -> mx.array:
    least = mx.maximum(gate * -powers.LOG2_E, powers.LOWEST)
    return mx.minimum(least, powers.HIGHEST)


@partial(mx.compile, shapeless=True)
def _one_more(fraction: mx.array, whole: mx.array) -> mx.array:
    return 1 + fraction * whole


@partial(mx.compile, shapeless=True)
def _gated(gate: mx.array, divisor: mx.array, x: mx.array) -> mx.array:
    return gate / divisor * x


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """Stands where mlx-lm's function stood: same arguments, same result but for rounding."""
    return _by_powers(gate, x) if powers.powers_are_faster(gate.dtype) else _original(gate, x)


def install(model: Any, dtype: mx.Dtype) -> bool:
    """Rebind the function in the modules that define ``model``, if that is worth it."""
    return powers.powers_are_faster(dtype) and rebind(model, _NAME, _original, swiglu)
