"""The queries and keys of a layer between its norms and its positions, for one kernel.

Norms give their input on as it is, and the first call for positions computes all four results.
Where a call turns out to be neither a decode step's nor a chunk's, the norm is computed with the
positions.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from batchkv_worker.kv.backends.gpu.fused_linear import FusedGroup
from batchkv_worker.kv.backends.gpu.rotary_layers import frequencies_of, turn_of
from batchkv_worker.kv.backends.host_numbers import host_numbers
from batchkv_worker.kv.kernels.launch import Input, View
from batchkv_worker.kv.kernels.rotary import MOST_TOKENS, RotaryKernel
from batchkv_worker.kv.kernels.value_parts import VALUE_PARTS


class Heads:
    """The queries and keys of one layer, between its norms and its positions.

    ``group``: the fused layers that computed them, queries first and then keys, if there are any.
    Then both are parts of one array, and so the kernel reads them. ``gives_values``: the values
    that come with the keys are its last part; ``may_give_values``: so they may be.
    ``takes_chunks``: the kernel computes those of several tokens a row, too.
    """

    def __init__(
        self,
        norms: tuple[Any, Any],
        rope: Any,
        kernel: RotaryKernel,
        group: FusedGroup | None = None,
    ) -> None:
        self._norms, self._kernel, self._group = norms, kernel, group
        self.may_give_values = self.gives_values = self.takes_chunks = False
        self._turn = turn_of(norms, rope)
        self._frequencies = frequencies_of(rope)
        self._given: list[mx.array | None] = [None, None]
        self._turned: mx.array | None = None  # the keys
        self.num_fused = 0  # steps, or traces of them
        self.num_chunks = 0

    def hold(self, place: int, x: mx.array) -> bool:
        """Whether the norm ``place`` leaves ``x`` ``[rows, tokens, heads, size]`` to the kernel."""
        if place == 0:
            self._given, self._turned = [None, None], None
        has_tokens = x.ndim == 4 and (x.shape[1] == 1 or self.takes_chunks)
        is_step = has_tokens and bool(x.dtype == self._norms[place].weight.dtype)
        if place == 1 and self._given[0] is None:
            return False  # else the queries' positions would take the keys for their own
        self._given[place] = x if is_step else None
        return is_step

    def take_chunks(self, taken: bool) -> None:
        """Whether the kernel, and the product of the fused layers, is used for chunks, too."""
        self.takes_chunks = taken
        if self._group is not None:
            self._group.takes_chunks = taken

    def turn(self, x: mx.array, offset: Any) -> tuple[mx.array, mx.array | None]:
        """The result for ``x`` ``[rows, heads, tokens, size]``, or what to turn, and None."""
        if self._turned is not None:
            turned, self._turned = self._turned, None
            return x, turned
        queries, keys = self._given
        if queries is None and keys is None:
            return x, None
        if queries is not None and keys is not None and _is_step(x, queries, keys, offset):
            self._given = [None, None]
            weights = self._norms[0].weight, self._norms[1].weight
            given = self._read(queries, keys)
            offsets = _places(x.shape[0], offset) if isinstance(offset, int) else offset
            what = *given, weights, self._frequencies, offsets
            found, self._turned = self._kernel(self._turn, *what)
            is_chunk = x.shape[2] > 1
            self.num_fused += not is_chunk
            self.num_chunks += is_chunk
            if self.gives_values and isinstance(given[1], View):
                start = given[1].start + keys.shape[2] * keys.shape[3]
                VALUE_PARTS.note(self._turned, given[1].whole, start)
            return x, found
        place = 0 if queries is not None else 1
        self._given[place] = None
        norm = self._norms[place]
        return mx.fast.rms_norm(x, norm.weight, norm.eps), None

    def _read(self, queries: mx.array, keys: mx.array) -> tuple[Input, Input]:
        """Both, as parts of what the fused layers computed, if they are."""
        whole = None if self._group is None else self._group.take_whole()
        if whole is None or self._group is None or whole.dtype != queries.dtype:
            return queries, keys
        rows, tokens, _, size = queries.shape
        step = whole.shape[-1]
        ends = tuple(accumulate(one.shape[2] * size for one in (queries, keys)))
        if whole.shape != (rows, tokens, step) or ends != (*self._group.ends, step)[:2]:
            return queries, keys
        strides = tokens * step, step, size, 1
        return View(queries, whole, 0, strides), View(keys, whole, ends[0], strides)


def _is_step(x: mx.array, queries: mx.array, keys: mx.array, offset: Any) -> bool:
    """Whether this is a decode step, with one position for each row, or a chunk."""
    rows, tokens, heads, size = queries.shape
    is_chunk = type(offset) is int and 1 < tokens <= MOST_TOKENS
    is_row_each = isinstance(offset, mx.array) and offset.shape == (rows,)
    has_places = is_chunk or (is_row_each and offset.dtype == mx.int32)
    shapes = x.shape == (rows, heads, tokens, size) and keys.shape[:2] == (rows, tokens)
    return shapes and has_places and bool(keys.dtype == queries.dtype)


@lru_cache(maxsize=8)
def _places(rows: int, position: int) -> mx.array:
    """The position of each row's first token; the same array for all layers of a chunk."""
    return host_numbers([position] * rows)


class HeldNorm(nn.RMSNorm):  # type: ignore[misc]  # MLX has no types
    """A norm of ``_heads``, and its ``_place`` there: 0 for queries, 1 for keys."""

    _heads: Heads
    _place: int

    def __call__(self, x: mx.array) -> mx.array:
        return x if self._heads.hold(self._place, x) else super().__call__(x)


class FusedRope(nn.RoPE):  # type: ignore[misc]
    """The positions of ``_heads``."""

    _heads: Heads

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        x, found = self._heads.turn(x, offset)
        return super().__call__(x, offset) if found is None else found


def in_use(model: Any) -> tuple[int, bool]:
    """How many layers have the kernel, and whether it computes chunks of prompts, too."""
    heads = [one._heads for one in model.modules() if isinstance(one, FusedRope)]
    return len(heads), bool(heads) and all(one.takes_chunks for one in heads)
