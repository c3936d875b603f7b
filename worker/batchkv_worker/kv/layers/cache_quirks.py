"""Support for models that use a cache for more than appending and reading."""

from __future__ import annotations

from abc import ABC, abstractmethod

import mlx.core as mx


class OrderedByUs(ABC):
    """``keys`` and ``values`` that models read and assign only to order MLX's evaluation.

    They make a cache's arrays depend on others (``mx.depends``), or drop an array that they never
    read, so that a graph does not grow without end. Here every buffer is evaluated at every step.
    So assigned arrays are dropped: another reference to a buffer would make MLX copy it.
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
