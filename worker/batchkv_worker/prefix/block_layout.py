"""Which of a model's layers a block holds, and how arrays become a block's tensors and back.

A stored block is of one kind: the layers that keep all tokens (``kv``), those of a sliding window
(``window``), or those with a state (``state``). Its tensors are the arrays of a ``Bundle``: arrays
of one shape and dtype over all those layers, stacked in the layers' order. Number, order, shapes
and dtypes of the arrays follow from the model's layers and the KV scheme, which are part of the
namespace; so a block needs no other table of contents, and one that differs is refused.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence, Set
from typing import Any

import mlx.core as mx

from batchkv_cache_store.blocks.block import Block, Buffer, Kind, Tensor
from batchkv_cache_store.keys import BLOCK_TOKENS
from batchkv_cache_store.lookup import Piece, Wanted
from batchkv_worker.kv.layers.contract import LayerKind
from batchkv_worker.kv.types import Pieces
from batchkv_worker.prefix.bundle import Bundle

# What Python's buffers call the numbers. They cannot be made of halves: those travel as their bits.
_FORMATS: dict[str, tuple[mx.Dtype, Any]] = {
    "uint8": (mx.uint8, "B"),
    "uint16": (mx.uint16, "H"),
    "uint32": (mx.uint32, "I"),
    "int32": (mx.int32, "i"),
    "float16": (mx.float16, "H"),
    "bfloat16": (mx.bfloat16, "H"),
    "float32": (mx.float32, "f"),
}
_NAMES = {dtype: name for name, (dtype, _) in _FORMATS.items()}


class BlockLayout:
    """The kinds of block that a model's layers need.

    ``kinds``: those that the model has layers of. ``token_kinds``: of those that keep tokens.
    """

    def __init__(self, kinds: Sequence[LayerKind]) -> None:
        self._places = [_kind_of(kind) for kind in kinds]
        self.kinds = [kind for kind in Kind if kind in self._places]
        self.token_kinds = tuple(kind for kind in self.kinds if kind is not Kind.STATE)
        self.has_kv, self.has_state = Kind.KV in self.kinds, Kind.STATE in self.kinds
        self._layers = kinds
        self._templates: dict[Kind, Bundle] = {}

    @property
    def num_window_blocks(self) -> int:
        """How many last blocks the next token still sees in the widest window; 0 without one."""
        windows = [kind.window for kind in self._layers if kind.window is not None]
        return max(1, -(-(max(windows) - 1) // BLOCK_TOKENS)) if windows else 0

    def part(self, kind: Kind, pieces: Sequence[Pieces | None]) -> Bundle:
        """Of pieces, one entry a layer, those that a block of ``kind`` holds."""
        places = zip(self._places, pieces, strict=True)
        return Bundle([piece if place is kind else None for place, piece in places])

    def template(self, kind: Kind) -> Bundle:
        """A block's arrays with the right shapes and dtypes, without their numbers."""
        if kind not in self._templates:
            pieces = [layer.template(BLOCK_TOKENS) for layer in self._layers]
            self._templates[kind] = self.part(kind, pieces)
        return self._templates[kind]

    @property
    def largest(self) -> int:
        """Bytes of a block's arrays, of the kind that has most."""
        return max(self.template(kind).nbytes for kind in self.kinds)

    def wanted(
        self, namespace: bytes, keys: Sequence[bytes], prompt: Sequence[int], had: Set[Piece]
    ) -> Wanted:
        """The blocks to look up for a prompt whose first full blocks have these keys."""
        return Wanted(
            namespace,
            keys,
            packed_tokens(prompt[: len(keys) * BLOCK_TOKENS], BLOCK_TOKENS),
            has_kv=self.has_kv,
            num_window_blocks=self.num_window_blocks,
            has_state=self.has_state,
            had=had,
        )

    def is_like(self, kind: Kind, bundle: Bundle) -> bool:
        """Whether another worker of this namespace would accept these arrays."""
        return _looks(bundle.arrays) == _looks(self.template(kind).arrays)

    def tensors(self, kind: Kind, data: Buffer) -> tuple[Tensor, ...]:
        """The tensors of a block whose ``joined`` bytes are ``data``; views, no copies."""
        view, end, tensors = memoryview(data), 0, list[Tensor]()
        for place, array in enumerate(self.template(kind).arrays):
            start, end = end, end + array.nbytes
            name, dtype, shape = f"{kind}.{place}", _NAMES[array.dtype], tuple(array.shape)
            tensors.append(Tensor(-1, name, dtype, shape, view[start:end]))
        return tuple(tensors)

    def bundle(self, block: Block) -> Bundle:
        """A block's arrays, copied out of its buffer; ValueError for wrong shapes or dtypes."""
        template = self.template(block.kind)
        given = [(tensor.dtype, tensor.shape) for tensor in block.tensors]
        if given != _looks(template.arrays):
            raise ValueError(f"a block of other arrays than this model's: {given}")
        return template.with_arrays([_array(tensor) for tensor in block.tensors])


def _kind_of(kind: LayerKind) -> Kind:
    if kind.has_state:
        return Kind.STATE
    return Kind.KV if kind.window is None else Kind.WINDOW


def _looks(arrays: Sequence[mx.array]) -> list[tuple[str, tuple[int, ...]]]:
    return [(_NAMES.get(array.dtype, "?"), tuple(array.shape)) for array in arrays]


def joined(bundle: Bundle) -> mx.array:
    """The bytes of all arrays, one after the other, in an array of their own (uint8).

    Nothing else reads it. So another thread may read its memory while the engine goes on, and a
    device may move it to the host.
    """
    parts = [array.reshape(-1).view(mx.uint8) for array in bundle.arrays if array.size]
    parts.append(mx.zeros(1, mx.uint8))  # one array alone would not be copied
    return mx.concatenate(parts)


def _array(tensor: Tensor) -> mx.array:
    dtype, code = _FORMATS[tensor.dtype]
    if not tensor.num_bytes:
        return mx.zeros(tensor.shape, dtype)
    plain = memoryview(tensor.data).cast("B")
    array = mx.array(plain.cast(code, tensor.shape))
    return array if array.dtype == dtype else array.view(dtype)


def packed_tokens(tokens: Sequence[int], block_tokens: int) -> list[bytes]:
    """Token ids as little-endian u32, block by block, full blocks only."""
    packed = struct.pack(f"<{len(tokens)}I", *tokens)
    size = 4 * block_tokens
    return [packed[at : at + size] for at in range(0, len(packed) - size + 1, size)]
