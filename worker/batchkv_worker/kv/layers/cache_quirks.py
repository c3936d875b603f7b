"""What some models do to a cache beyond appending and reading."""

from __future__ import annotations

from abc import ABC, abstractmethod

import mlx.core as mx


class OrderedByUs(ABC):
    """``keys`` and ``values`` that models read and assign only to order MLX's evaluation.

    They tie a cache's arrays to others (``mx.depends``) or drop an array they never read, lest a
    graph grow without end. Here every buffer is evaluated at every step, so what is assigned is let
    go: it would be one more reference to a buffer, which MLX would then copy to write.
    """

    @property
    @abstractmethod
    def arrays(self) -> list[mx.array]:
        """Parts of keys, then of values."""

    @property
    def keys(self) -> mx.array:
        return self.arrays[0]

    @keys.setter
    def keys(self, value: mx.array) -> None:
        del value

    @property
    def values(self) -> mx.array:
        return self.arrays[-1]

    @values.setter
    def values(self, value: mx.array) -> None:
        del value
