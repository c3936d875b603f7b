"""Rotary positions on a CPU: sines and cosines are computed once a step for all layers.

MLX has one kernel for rotary positions on a GPU. On a CPU it puts them together from about thirty
operations, for queries and for keys of each layer, although all layers of a step have the same
positions. Here the sines and cosines of a step, or of a chunk, are kept. A rotation is then a
product with a matrix that swaps halves, and one kernel more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from batchkv_worker.kv.backends.contract import Undo
from batchkv_worker.kv.backends.rebind import swap_class, undo_all
from batchkv_worker.kv.backends.timing import gain

_MARGIN = 1.2  # by which kept tables have to be faster
_TIMES = 8  # rotations that are timed together


@dataclass(frozen=True, slots=True)
class Rotary:
    """How a layer rotates: ``dims`` of the ``size`` numbers of a head; the others stay."""

    size: int
    dims: int
    traditional: bool
    base: float
    scale: float


Table = tuple[mx.array, mx.array]  # cosines and sines, [rows or 1, 1, tokens, size]


class RopeTables:
    """The tables of the current step and of the current chunk."""

    def __init__(self) -> None:
        # Positions and tables are one tuple, so that another thread's ``begin`` cannot mix them.
        self._of_step: tuple[mx.array | None, dict[Rotary, Table]] = None, {}
        self._of_chunk: tuple[tuple[int, int], dict[Rotary, Table]] = (0, 0), {}

    def begin(self, offsets: mx.array) -> None:
        """A step begins; ``offsets`` ``[rows]`` will not be changed.

        The owner of any other array may change it, so tables are never kept for other arrays.
        """
        self._of_step = offsets, {}

    def of(self, rotary: Rotary, num_tokens: int, offset: int | mx.array) -> Table | None:
        """The table of tokens from ``offset`` on; None for an array that is not the step's."""
        if isinstance(offset, mx.array):
            offsets, known = self._of_step
            if offset is not offsets or num_tokens != 1:
                return None
        else:
            chunk, known = self._of_chunk
            if chunk != (num_tokens, offset):
                known = {}
                self._of_chunk = (num_tokens, offset), known
        if rotary not in known:
            known[rotary] = table(rotary, num_tokens, offset)
        return known[rotary]


class CachedRoPE(nn.RoPE):  # type: ignore[misc]  # MLX does not say what its layers are
    """An ``nn.RoPE`` that looks into ``_tables`` first."""

    _tables: RopeTables

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        if x.dtype == mx.float32 and x.ndim == 4:
            rotary = Rotary(x.shape[-1], self.dims, self.traditional, self.base, self.scale)
            known = self._tables.of(rotary, x.shape[-2], offset)
            if known is not None:
                return rotated(x, rotary, known)
        plain: mx.array = super().__call__(x, offset)
        return plain


def table(rotary: Rotary, num_tokens: int, offset: int | mx.array) -> Table:
    """Cosines and sines by which each number of a head is rotated; as MLX computes its own."""
    half = rotary.dims // 2
    first = offset.reshape(-1, 1) if isinstance(offset, mx.array) else mx.array([[offset]])
    positions = (first + mx.arange(num_tokens)).astype(mx.float32) * rotary.scale
    speeds = mx.exp(mx.arange(half) * -(mx.log(mx.array(float(rotary.base))) / half))
    angles = positions[..., None] * speeds
    still = (*angles.shape[:-1], rotary.size - rotary.dims)

    def line(numbers: mx.array, rest: mx.array) -> mx.array:
        whole = (
            mx.repeat(numbers, 2, axis=-1)
            if rotary.traditional
            else mx.concatenate([numbers, numbers], axis=-1)
        )
        return mx.concatenate([whole, rest], axis=-1)[:, None]

    return line(mx.cos(angles), mx.ones(still)), line(mx.sin(angles), mx.zeros(still))


def rotated(x: mx.array, rotary: Rotary, known: Table) -> mx.array:
    """``x`` ``[rows, heads, tokens, size]`` at the positions of the table."""
    return _rotated(x, x @ _swap(rotary.size, rotary.dims, rotary.traditional), *known)


@partial(mx.compile, shapeless=True)
def _rotated(x: mx.array, swapped: mx.array, cosines: mx.array, sines: mx.array) -> mx.array:
    return x * cosines + swapped * sines


@cache
def _swap(size: int, dims: int, traditional: bool) -> mx.array:
    """The matrix that gives each number the other one of its pair, the first one negated."""
    half = dims // 2
    pairs = [(2 * i, 2 * i + 1) if traditional else (i, i + half) for i in range(half)]
    lines = [[0.0] * size for _ in range(size)]
    for first, second in pairs:
        lines[second][first] = -1.0
        lines[first][second] = 1.0
    matrix = mx.array(lines)
    mx.eval(matrix)
    return matrix


@dataclass(frozen=True)
class CacheRope:
    """Lets the plain rotary layers of a model use ``tables``."""

    tables: RopeTables

    def install(self, model: Any) -> Undo:
        layers = {id(layer): layer for layer in model.modules() if type(layer) is nn.RoPE}
        return undo_all(
            [swap_class(layer, CachedRoPE, _tables=self.tables) for layer in layers.values()]
        )


@cache
def is_faster() -> bool:
    """Whether a kept table beats MLX's rotary positions on this device.

    Measured once, on queries of a step. Computing the table is not counted: many layers share it.
    """
    x, rotary = mx.random.normal((16, 4, 1, 64)), Rotary(64, 64, False, 10000.0, 1.0)
    offsets = mx.arange(16)
    known = table(rotary, 1, offsets)
    mx.eval(x, known)
    plain = nn.RoPE(64)
    won = gain(lambda: plain(x, offsets), lambda: rotated(x, rotary, known), times=_TIMES)
    return won > _MARGIN
