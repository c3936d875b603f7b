"""Arrays that a model gets where it hands them on unread.

A cache returns dense keys and values to its model. Most models only pass them to the attention
function, which asks the cache instead. Building dense arrays that nobody reads costs the host as
much as attention does: views and unpacking for each layer and step. Such models get arrays of the
same shape and dtype that are made once and hold no number, so that a model that does read them
gives no number either. ``kv.start.unread`` checks this at start.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from batchkv_worker.kv.attention.paths import LayerAttention

Pair = tuple[mx.array, mx.array]


class StandIns:
    """The stand-ins of one layer. Those of the last shape are used again."""

    def __init__(self, layer: LayerAttention) -> None:
        self._shape, self._dtype = layer.scheme.shape, layer.dtype
        self._made_for = (-1, -1)
        self._pair: Pair | None = None

    def of(self, rows: int, columns: int) -> Pair:
        """Keys and values ``[rows, heads, columns, size]``."""
        if self._pair is None or self._made_for != (rows, columns):
            shape, nothing = self._shape, mx.array(math.nan, self._dtype)
            keys, values = (
                mx.broadcast_to(nothing, (rows, shape.num_heads, columns, size))
                for size in (shape.key_size, shape.value_size)
            )
            self._made_for, self._pair = (rows, columns), (keys, values)
        return self._pair


def replaced(handed: Pair, keys: Any, values: Any, read: Callable[[], Pair]) -> tuple[Any, Any]:
    """``keys`` and ``values``; those that were ``handed`` out are read first."""
    if keys is not handed[0] and values is not handed[1]:
        return keys, values
    found = read()
    return (
        found[0] if keys is handed[0] else keys,
        found[1] if values is handed[1] else values,
    )
