"""Decode slots: one layer's cache while rows generate, one token a row and step.

``SlotLayout`` decides where everything is; this module moves the tensors accordingly. All layers
share one ``Frame``: which rows and columns the step at hand reads, and each row's position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from batchkv_worker.kv import attention
from batchkv_worker.kv.layout import Relayout, SlotLayout, round_up
from batchkv_worker.kv.schemes import LayerScheme, Parts, TensorScheme


@dataclass(slots=True)
class Frame:
    """The step at hand, the same for all layers: rows [0, num_rows), columns [low, high).

    ``offsets`` (int32, ``[rows]``) are the positions of the tokens being decoded; the array is
    bound anew each step, never changed, since models may hold on to it. ``mask`` is bool
    ``[rows, 1, 1, columns]``, or None when every row owns every column. ``write`` is the column
    that the step writes; it is the last, unless shapes are rounded.
    """

    num_rows: int
    low: int
    high: int
    write: int
    offsets: mx.array
    mask: mx.array | None

    @classmethod
    def of(cls, layout: SlotLayout, shape_step: int = 1) -> Frame:
        """The layout's next step. Columns are rounded outwards to ``shape_step``, rows to 8.

        A backend that prepares a kernel for each new shape then meets few shapes; what rounding
        adds is masked.
        """
        write = layout.write
        rows = layout.num_rows
        if shape_step > 1:
            rows = min(layout.rows, round_up(rows, 8))
        low = layout.lowest // shape_step * shape_step
        high = min(layout.capacity, round_up(write + 1, shape_step))
        starts = [layout.start(slot) for slot in range(rows)]
        mask = None
        if high > write + 1 or any(start != low for start in starts):
            columns = mx.arange(low, high)
            mask = (columns >= mx.array(starts).reshape(-1, 1, 1, 1)) & (columns <= write)
        offsets = mx.array([write - start for start in starts], dtype=mx.int32)
        return cls(rows, low, high, write, offsets, mask)


class SlotCache:
    """One layer's slots: packed ``[slots, heads, capacity, part size]``, rows right-aligned.

    Follows mlx-lm's cache contract as far as its models use it; ``frame`` must be set before each
    step. Dense keys and values are handed out lazily: MLX computes them only if somebody reads
    them, so that ``attend`` can answer from the packed parts at no cost.
    """

    def __init__(self, scheme: LayerScheme, path: attention.Path, dtype: mx.Dtype) -> None:
        self.frame: Frame = Frame(0, 0, 0, 0, mx.array([], mx.int32), None)
        self._scheme = scheme
        self._path = path
        self._dtype = dtype
        self._keys: list[mx.array] = []
        self._values: list[mx.array] = []
        self._handed: tuple[mx.array, mx.array] | None = None
        if path != "fused":
            self.attend = self._attend

    @property
    def offset(self) -> mx.array:
        return self.frame.offsets

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers as they are now."""
        return sum(part.nbytes for part in self.arrays)

    @property
    def arrays(self) -> list[mx.array]:
        return [*self._keys, *self._values]

    def make_mask(
        self, num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> Any:
        if num_tokens != 1 or window_size is not None:
            raise ValueError("decode slots take one token a row and have no window")
        return self.frame.mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write one token a row, ``[rows, heads, 1, size]``; dense views of all visible columns."""
        frame = self.frame
        for parts, piece in (
            (self._keys, self._scheme.keys.pack(keys)),
            (self._values, self._scheme.values.pack(values)),
        ):
            for part, new in zip(parts, piece, strict=True):
                part[: frame.num_rows, :, frame.write : frame.write + 1] = new
        self._handed = (
            self._scheme.keys.unpack(self._visible(self._keys)),
            self._scheme.values.unpack(self._visible(self._values)),
        )
        return self._handed

    def handed_out(self, keys: Any, values: Any, mask: Any) -> bool:
        """Whether these are what the last update returned, with this step's own mask."""
        same = self._handed is not None and keys is self._handed[0] and values is self._handed[1]
        return same and mask is self.frame.mask

    def _attend(self, queries: mx.array, scale: float, mask: mx.array | None) -> mx.array:
        keys, values = self._visible(self._keys), self._visible(self._values)
        if self._path == "packed":
            return attention.packed(queries, keys, values, self._scheme, scale, mask)
        dense_keys, dense_values = (
            self._scheme.keys.unpack(keys),
            self._scheme.values.unpack(values),
        )
        return attention.folded(queries, dense_keys, dense_values, scale, mask)

    def _visible(self, parts: list[mx.array]) -> Parts:
        frame = self.frame
        return tuple(part[: frame.num_rows, :, frame.low : frame.high] for part in parts)

    def forget_step(self) -> None:
        """Drop what was handed out, so that no array outlives its step."""
        self._handed = None

    def admit(self, slot: int, write: int, keys: Parts, values: Parts) -> None:
        """Copy a row's packed ``[1, heads, tokens, part size]`` to end at column ``write``."""
        for parts, piece in ((self._keys, keys), (self._values, values)):
            for part, row in zip(parts, piece, strict=True):
                part[slot : slot + 1, :, write - row.shape[2] : write] = row

    def relayout(self, change: Relayout) -> None:
        """Rebuild the buffers as ``change`` says."""
        if not self._keys:
            shape = self._scheme.shape
            self._keys = self._empty(self._scheme.keys, shape.key_size, change)
            self._values = self._empty(self._scheme.values, shape.value_size, change)
            return
        self._keys = [_rebuilt(part, change) for part in self._keys]
        self._values = [_rebuilt(part, change) for part in self._values]

    def _empty(self, scheme: TensorScheme, size: int, change: Relayout) -> list[mx.array]:
        sample = scheme.pack(mx.zeros((1, 1, 1, size), self._dtype))
        heads = self._scheme.shape.num_heads
        return [
            mx.zeros((change.rows, heads, change.capacity, part.shape[-1]), part.dtype)
            for part in sample
        ]

    def move(self, source: int, target: int, low: int, write: int) -> None:
        """Copy a row's columns [low, write) to another slot."""
        for part in self.arrays:
            part[target : target + 1, :, low:write] = part[source : source + 1, :, low:write]


def _rebuilt(part: mx.array, change: Relayout) -> mx.array:
    new = mx.zeros((change.rows, part.shape[1], change.capacity, part.shape[3]), part.dtype)
    rows = min(change.rows, part.shape[0])
    if change.high > change.low:
        low, high = change.low + change.shift, change.high + change.shift
        new[:rows, :, low:high] = part[:rows, :, change.low : change.high]
    return new
