"""Where values are, when one product gave queries, keys and values.

A kernel whose code is kept copies what does not lie in one piece (``compiled_launch.py``).
Values of a fused product are such an array. Models hand keys and values to a cache together, so the
keys that a layer has just turned tell which product the values come from.
"""

from __future__ import annotations

import mlx.core as mx

from batchkv_worker.kv.kernels.launch import Input, View


class ValueParts:
    """The keys that were turned last, and the outputs of the product that gave the values."""

    def __init__(self) -> None:
        self._last: tuple[mx.array, mx.array, int] | None = None

    def note(self, keys: mx.array, whole: mx.array, start: int) -> None:
        """``keys`` come with values that begin at ``start`` of each row of ``whole``."""
        self._last = keys, whole, start

    def clear(self) -> None:
        """Hold no arrays: those of a traced step would hold the model."""
        self._last = None

    def of(self, keys: mx.array, values: mx.array) -> Input:
        """``values`` ``[rows, kv heads, tokens, size]``, as a view if they came with these keys."""
        last, self._last = self._last, None
        if last is None or last[0] is not keys:
            return values
        _, whole, start = last
        rows, kv_heads, tokens, size = values.shape
        step = start + kv_heads * size
        if whole.shape != (rows, tokens, step) or whole.dtype != values.dtype:
            return values
        return View(values, whole, start, (tokens * step, size, step, 1))


VALUE_PARTS = ValueParts()  # one engine's thread runs all models of a process
