"""Prefill rows: the cache of one layer while prompts are computed.

Rows of a group start at position 0 and are right-padded: under a causal mask no real token ever
sees a pad, so nothing is rolled or finalized, and row j is simply ``[:length[j]]``. Keys and values
are packed as soon as they are made and attention always sees what was packed (for the chunk itself
as for its history), so that neither chunk size nor batch changes what is computed.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from batchkv_worker.kv.schemes import LayerScheme, Parts


class PrefillCache:
    """One layer's packed keys and values, ``[rows, heads, capacity, part size]``.

    Follows mlx-lm's cache contract as far as its models use it: ``offset``, ``make_mask`` and
    ``update_and_fetch``.
    """

    def __init__(self, scheme: LayerScheme, capacity: int) -> None:
        self.offset = 0
        self._scheme = scheme
        self._capacity = capacity
        self._keys: list[mx.array] = []
        self._values: list[mx.array] = []

    def make_mask(
        self, num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> Any:
        if window_size is not None:
            return create_causal_mask(num_tokens, self.offset, window_size=window_size)
        if num_tokens == 1:
            return None
        return create_causal_mask(num_tokens, self.offset) if return_array else "causal"

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Take a chunk ``[rows, heads, tokens, size]``; what attention sees up to its end."""
        start, end = self.offset, self.offset + keys.shape[2]
        self._store(self._keys, self._scheme.keys.pack(keys), start, end)
        self._store(self._values, self._scheme.values.pack(values), start, end)
        self.offset = end
        return (
            self._scheme.keys.unpack(_columns(self._keys, end)),
            self._scheme.values.unpack(_columns(self._values, end)),
        )

    def _store(self, parts: list[mx.array], packed: Parts, start: int, end: int) -> None:
        if start == 0 and end == self._capacity:  # the whole row in one chunk
            parts[:] = packed
            return
        if not parts:
            parts[:] = [
                mx.zeros((*p.shape[:2], self._capacity, p.shape[3]), p.dtype) for p in packed
            ]
        for part, piece in zip(parts, packed, strict=True):
            part[:, :, start:end] = piece

    def restore(self, keys: Parts, values: Parts, num_tokens: int) -> None:
        """Start after ``num_tokens`` packed ones, ``[rows, heads, num_tokens, part size]``."""
        self._keys = [self._widened(part) for part in keys]
        self._values = [self._widened(part) for part in values]
        self.offset = num_tokens

    def _widened(self, part: mx.array) -> mx.array:
        rows, heads, tokens, size = part.shape
        if tokens == self._capacity:
            return part
        rest = mx.zeros((rows, heads, self._capacity - tokens, size), part.dtype)
        return mx.concatenate([part, rest], axis=2)

    def block(self, index: int, start: int, end: int) -> tuple[Parts, Parts]:
        """Packed keys and values of one row's tokens [start, end)."""
        return (
            tuple(part[index : index + 1, :, start:end] for part in self._keys),
            tuple(part[index : index + 1, :, start:end] for part in self._values),
        )

    def row(self, index: int, length: int) -> tuple[Parts, Parts]:
        """Packed keys and values of one row's first ``length`` tokens."""
        return self.block(index, 0, length)

    @property
    def arrays(self) -> list[mx.array]:
        """What must be evaluated for the chunk to have been computed."""
        return [*self._keys, *self._values]


def _columns(parts: list[mx.array], end: int) -> Parts:
    return tuple(part if part.shape[2] == end else part[:, :, :end] for part in parts)
