"""Rotary positions on a CPU: the sines and cosines of a step are computed once for all layers.

MLX has one kernel for them on a GPU. On a CPU it puts them together from about thirty operations,
anew for queries and for keys of each layer, although all rows stand where they stood a layer
before. Here the angles of a step, or of a chunk, are kept, and a rotation is a product with a
matrix that swaps halves, and one kernel more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from batchkv_worker.kv.backends.device import is_float32_on_cpu
from batchkv_worker.kv.backends.timing import gain

_MARGIN = 1.2  # by which kept angles have to be faster
_TIMES = 8  # rotations that are timed together


@dataclass(frozen=True, slots=True)
class Turn:
    """How a model turns: ``dims`` of the ``size`` numbers of a head, the rest stay as they are."""

    size: int
    dims: int
    traditional: bool
    base: float
    scale: float


Table = tuple[mx.array, mx.array]  # cosines and sines, [rows or 1, 1, tokens, size]


class Angles:
    """Tables of the step and of the chunk at hand."""

    def __init__(self) -> None:
        # Each with what it is of, in one piece: another thread's begin must not come between.
        self._of_step: tuple[mx.array | None, dict[Turn, Table]] = None, {}
        self._of_chunk: tuple[tuple[int, int], dict[Turn, Table]] = (0, 0), {}

    def begin(self, offsets: mx.array) -> None:
        """A step begins; ``offsets`` ``[rows]`` will not be changed.

        Other arrays may be, by whoever made them, so they are never taken for known.
        """
        self._of_step = offsets, {}

    def of(self, turn: Turn, num_tokens: int, offset: int | mx.array) -> Table | None:
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
        if turn not in known:
            known[turn] = table(turn, num_tokens, offset)
        return known[turn]


ANGLES = Angles()


class KeptRoPE(nn.RoPE):  # type: ignore[misc]  # MLX does not say what its layers are
    """An ``nn.RoPE`` that asks ``ANGLES`` first."""

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        if x.dtype == mx.float32 and x.ndim == 4:
            turn = Turn(x.shape[-1], self.dims, self.traditional, self.base, self.scale)
            known = ANGLES.of(turn, x.shape[-2], offset)
            if known is not None:
                return turned(x, turn, known)
        plain: mx.array = super().__call__(x, offset)
        return plain


def table(turn: Turn, num_tokens: int, offset: int | mx.array) -> Table:
    """Cosines and sines by which each number of a head is turned; as MLX computes its own."""
    half = turn.dims // 2
    first = offset.reshape(-1, 1) if isinstance(offset, mx.array) else mx.array([[offset]])
    positions = (first + mx.arange(num_tokens)).astype(mx.float32) * turn.scale
    speeds = mx.exp(mx.arange(half) * -(mx.log(mx.array(float(turn.base))) / half))
    angles = positions[..., None] * speeds
    still = (*angles.shape[:-1], turn.size - turn.dims)

    def line(numbers: mx.array, rest: mx.array) -> mx.array:
        whole = (
            mx.repeat(numbers, 2, axis=-1)
            if turn.traditional
            else mx.concatenate([numbers, numbers], axis=-1)
        )
        return mx.concatenate([whole, rest], axis=-1)[:, None]

    return line(mx.cos(angles), mx.ones(still)), line(mx.sin(angles), mx.zeros(still))


def turned(x: mx.array, turn: Turn, known: Table) -> mx.array:
    """``x`` ``[rows, heads, tokens, size]`` at the positions of the table."""
    return _turned(x, x @ _swap(turn.size, turn.dims, turn.traditional), *known)


@partial(mx.compile, shapeless=True)
def _turned(x: mx.array, swapped: mx.array, cosines: mx.array, sines: mx.array) -> mx.array:
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


def install(model: Any, dtype: mx.Dtype) -> bool:
    """Let the model's plain rotary layers keep angles, if that is worth it."""
    is_worth_it = is_float32_on_cpu(dtype) and _is_faster()
    found = False
    for module in model.modules():
        if type(module) in (nn.RoPE, KeptRoPE):
            module.__class__ = KeptRoPE if is_worth_it else nn.RoPE
            found = True
    return found and is_worth_it


@cache
def _is_faster() -> bool:
    """Measured once, on queries of a step; the table is shared by too many to count."""
    x, turn = mx.random.normal((16, 4, 1, 64)), Turn(64, 64, False, 10000.0, 1.0)
    offsets = mx.arange(16)
    known = table(turn, 1, offsets)
    mx.eval(x, known)
    plain = nn.RoPE(64)
    won = gain(lambda: plain(x, offsets), lambda: turned(x, turn, known), times=_TIMES)
    return won > _MARGIN
