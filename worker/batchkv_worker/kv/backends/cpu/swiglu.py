"""SwiGLU, the gate of a model's feed-forward layers, by powers of two.

mlx-lm's models call one function, ``models.activations.swiglu``, by the name that each model's
module imported. It computes an exponential for each number; see ``exp2``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models import activations

from batchkv_worker.kv.backends import rebind
from batchkv_worker.kv.backends.contract import Undo
from batchkv_worker.kv.backends.cpu import exp2

_NAME = "swiglu"
_original = activations.swiglu


@partial(mx.compile, shapeless=True)
def _scaled(gate: mx.array) -> mx.array:
    least = mx.maximum(gate * -exp2.LOG2_E, exp2.LOWEST)
    return mx.minimum(least, exp2.HIGHEST)


@partial(mx.compile, shapeless=True)
def _one_more(fraction: mx.array, whole: mx.array) -> mx.array:
    return 1 + fraction * whole


@partial(mx.compile, shapeless=True)
def _gated(gate: mx.array, divisor: mx.array, x: mx.array) -> mx.array:
    return gate / divisor * x


def swiglu(gate: mx.array, x: mx.array) -> Any:
    """In the place of mlx-lm's function: same arguments, same result but for rounding."""
    if gate.dtype != mx.float32:
        return _original(gate, x)
    scaled = _scaled(gate)
    return _gated(gate, _one_more(exp2.fraction(scaled), exp2.whole(scaled)), x)


@dataclass(frozen=True)
class Exp2Swiglu:
    """Models call ``swiglu`` instead of mlx-lm's function."""

    def install(self, model: Any) -> Undo:
        replacement = rebind.Replacement(_original, swiglu)
        rebind.rebind(model, _NAME, _original, replacement)

        def undo() -> None:
            rebind.rebind(model, _NAME, replacement, _original)

        return undo


def is_used(model: Any) -> bool:
    """Whether the modules of ``model`` call the function by this name."""
    return rebind.binds(model, _NAME, [_original])
