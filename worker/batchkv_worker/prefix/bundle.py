"""Stores the arrays of many layers as a few large ones, because arrays have a limit on Metal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from batchkv_cache_store.blocks.block import Kind
from batchkv_cache_store.keys import BLOCK_TOKENS
from batchkv_worker.kv.types import Pieces

PIECES_TOGETHER = 12  # of one shape: those of a few layers
LARGE_PIECE_BYTES = 2**16  # of a block's piece: copying it takes longer than a call
ALL_PIECES = 2**31 - 1  # MLX slices by 32-bit integers
EMPTY_BYTES = 1024  # counted for a block without arrays (every layer has a state)


class Bundle:
    """One row's pieces of all layers, copied out; arrays of one shape and dtype are stacked.

    A Metal process can hold half a million arrays at most, and a block of many layers has hundreds.
    """

    def __init__(self, layers: Sequence[Pieces | None]) -> None:
        alike: dict[tuple[tuple[int, ...], mx.Dtype], tuple[int, list[mx.array]]] = {}
        self._places: list[list[tuple[int, int]] | None] = []
        for pieces in layers:
            if pieces is None:
                self._places.append(None)
                continue
            places = []
            for array in pieces:
                number, stack = alike.setdefault((array.shape, array.dtype), (len(alike), []))
                places.append((number, len(stack)))
                stack.append(array)
            self._places.append(places)
        # A single array is a view of a larger one, and stacking it alone would copy nothing.
        self.arrays = [
            mx.stack(stack) if len(stack) > 1 else mx.contiguous(stack[0])[None]
            for _, stack in alike.values()
        ]

    def layer(self, index: int) -> Pieces | None:
        """The pieces of one layer."""
        places = self._places[index]
        return None if places is None else tuple(_view(self.arrays[a], i) for a, i in places)

    def place(self, index: int) -> list[tuple[int, int]]:
        """Where the pieces of one layer are: the numbers of an array, and of a piece in it."""
        return self._places[index] or []

    def with_arrays(self, arrays: Sequence[mx.array]) -> Bundle:
        """The same pieces of the same layers, in other arrays of the same shapes."""
        other = Bundle([])
        other._places, other.arrays = self._places, list(arrays)
        return other

    def after(self, num_tokens: int) -> Bundle:
        """Without its first tokens, as views; itself, if that leaves out none."""
        if not num_tokens:
            return self
        return self.with_arrays([array[..., num_tokens:, :] for array in self.arrays])

    def copied(self) -> Bundle:
        """The same pieces in arrays of their own, where these are views."""
        return self.with_arrays([mx.contiguous(array) for array in self.arrays])

    @property
    def nbytes(self) -> int:
        return sum(int(array.nbytes) for array in self.arrays)


@dataclass(slots=True)
class HeldBlock:
    """A block in this worker's memory, by the kind of its layers.

    ``is_converted``: it was computed from values that another scheme rounded; not shared.
    """

    parts: dict[Kind, Bundle] = field(default_factory=dict)
    is_converted: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values()) or EMPTY_BYTES

    def beginning(self, num_tokens: int) -> HeldBlock:
        """Its first tokens, as views. A state is of its last token, so it has none."""
        parts: dict[Kind, Bundle] = {
            kind: part.with_arrays([array[..., :num_tokens, :] for array in part.arrays])
            for kind, part in self.parts.items()
            if kind is not Kind.STATE
        }
        return HeldBlock(parts, self.is_converted)


class Joined:
    """The pieces of rows, each of a chain of blocks, joined for several layers at once.

    To join them layer by layer takes the host longer than the device. Rows that have the same
    blocks are joined once.

    Large pieces of one row are joined one by one, if tokens will follow them. Then each is an array
    of its own, into which MLX writes those tokens. Of several in one array it would copy each.
    """

    def __init__(
        self,
        rows: Sequence[Sequence[Bundle]],
        together: int = PIECES_TOGETHER,
        num_following: int = 0,
    ) -> None:
        """The blocks of each row, of equal number and alike.

        ``together``: pieces of one shape that are joined at once, and in memory together.
        ``num_following``: tokens that will follow; the pieces end with zeros in their place.
        """
        self._rows, self._together, self._num_following = rows, together, num_following
        # By array the last group, and its pieces; layers are asked in order.
        self._last: dict[int, tuple[int, list[mx.array]]] = {}

    def layer(self, index: int) -> Pieces:
        """The pieces ``[rows, ...]`` of one layer, block after block along the tokens."""
        found = []
        for array, number in self._rows[0][0].place(index):
            if self._is_alone(array):
                pieces = [_view(block.arrays[array], number) for block in self._rows[0]]
                found.append(self._line(pieces))
                continue
            group, inside = divmod(number, self._together)
            if self._last.get(array, (-1,))[0] != group:
                self._last[array] = group, _views(self._join(array, group))
            found.append(self._last[array][1][inside])
        return tuple(found)

    def _is_alone(self, array: int) -> bool:
        """Whether each piece of this array is joined by itself."""
        block = self._rows[0][0].arrays[array]
        is_large = block.nbytes >= LARGE_PIECE_BYTES * block.shape[0]
        return is_large and len(self._rows) == 1 and self._num_following > 0

    def _line(self, parts: list[mx.array]) -> mx.array:
        """One row's pieces one after the other, and zeros for the tokens that will follow."""
        if self._num_following:
            *outer, _, size = parts[0].shape
            parts = [*parts, mx.zeros((*outer, self._num_following, size), parts[0].dtype)]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-2)

    def _join(self, array: int, group: int) -> mx.array:
        some = slice(group * self._together, (group + 1) * self._together)
        lines: dict[tuple[int, ...], mx.array] = {}
        order = []
        for blocks in self._rows:
            key = tuple(map(id, blocks))
            order.append(key)
            if key not in lines:
                lines[key] = self._line([block.arrays[array][some] for block in blocks])
        if 1 < len(lines) == len(order):
            return mx.concatenate([*lines.values()], axis=1)
        if len(lines) > 1:
            places = {key: place for place, key in enumerate(lines)}
            index = mx.array([places[key] for key in order], mx.int32)
            return mx.take(mx.concatenate([*lines.values()], axis=1), index, axis=1)
        (line,) = lines.values()
        return mx.broadcast_to(line, (line.shape[0], len(order), *line.shape[2:]))


def _view(array: mx.array, index: int) -> mx.array:
    """``array[index]`` without a copy, which MLX makes for a number in brackets."""
    return mx.take(array, index, axis=0)


def _views(array: mx.array) -> list[mx.array]:
    """All of them; of one row by one operation for all."""
    count, rows, *sizes = array.shape
    if rows == 1:
        found: list[mx.array] = mx.split(array.reshape(count, *sizes), count)
        return found
    return [_view(array, index) for index in range(count)]


def parts_after(num_tokens: int, chains: Sequence[Sequence[HeldBlock]]) -> list[list[Bundle]]:
    """What keeps all tokens of chains of blocks, from a token on; equal parts are one object."""
    number, skipped = divmod(num_tokens, BLOCK_TOKENS)
    cut: dict[int, Bundle] = {}
    found = []
    for chain in chains:
        first, *rest = (block.parts[Kind.KV] for block in chain[number:])
        if id(first) not in cut:
            cut[id(first)] = first.after(skipped)
        found.append([cut[id(first)], *rest])
    return found


def block_pieces(block: HeldBlock, kind: Kind, layer: int) -> Pieces:
    """The pieces of a layer, which is of that kind."""
    pieces = block.parts[kind].layer(layer)
    assert pieces is not None
    return pieces


def assemble(lines: list[Pieces], axis: int) -> Pieces:
    """Pieces side by side: blocks along the tokens (-2), or rows along the batch (0)."""
    if len(lines) == 1:
        return lines[0]
    return tuple(mx.concatenate(parts, axis=axis) for parts in zip(*lines, strict=True))
