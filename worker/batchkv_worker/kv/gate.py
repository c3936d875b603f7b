"""The gate of a model's feed-forward layers, by powers of two where those are faster.

mlx-lm's models call one function, ``models.activations.swiglu``, by the name that each model's
module imported. It computes an exponential for each number; what that costs on a CPU and what is
done about it says ``softmax``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models import activations

from batchkv_worker.kv import softmax
from batchkv_worker.kv.rebind import rebind

_NAME = "swiglu"
_original = activations.swiglu


@partial(mx.compile, shapeless=True)
def _by_powers(gate: mx.array, x: mx.array) -> mx.array:
    return gate / (1 + mx.power(2.0, gate * -softmax.LOG2_E)) * x


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """Stands where mlx-lm's function stood: same arguments, same result but for rounding."""
    return _by_powers(gate, x) if softmax.by_powers(gate.dtype) else _original(gate, x)


def install(model: Any, dtype: mx.Dtype) -> bool:
    """Rebind the function in the modules that define ``model``, if that is worth it."""
    return softmax.by_powers(dtype) and rebind(model, _NAME, _original, swiglu)
