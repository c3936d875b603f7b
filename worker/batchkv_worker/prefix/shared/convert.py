"""Float blocks of the same model, packed into this worker's scheme if it is set so.

Blocks of a float worker and of a quantized one are of different namespaces, and nothing of the one
is ever taken for the other. A worker with ``--kv-adopt-float`` may pack float blocks itself. Their
numbers come from attention over floats, not over what this scheme rounds, so a row that goes on
from them may answer otherwise than a row computed here; they and what is computed after them stay
in this worker.
"""

from __future__ import annotations

from dataclasses import replace

from batchkv_cache_store.blocks.block import Block, Kind
from batchkv_cache_store.keys import Manifest
from batchkv_worker.kv.layers.contract import LayerKind
from batchkv_worker.kv.layers.kinds import AttentionKind
from batchkv_worker.kv.schemes.packing import LayerScheme, TensorScheme
from batchkv_worker.kv.types import Pieces
from batchkv_worker.prefix.block_layout import BlockLayout
from batchkv_worker.prefix.bundle import Bundle
from batchkv_worker.prefix.shared.identity import describe


class FloatBlocks:
    """The float form of a plan's layers."""

    def __init__(self, kinds: tuple[LayerKind, ...]) -> None:
        self._kinds = kinds
        self._floats = tuple(map(_float_form, kinds))
        self._block_layout = BlockLayout(self._floats)
        self._target = BlockLayout(kinds)

    @property
    def is_needed(self) -> bool:
        """Whether any layer is packed: a float worker has nothing to convert."""
        return self._floats != self._kinds

    def manifest(self, own: Manifest) -> Manifest:
        """What a float worker of this model says of itself."""
        return {**own, "layers": [describe(kind) for kind in self._floats]}

    def convert(self, block: Block) -> Bundle:
        """A float block's part, packed; ValueError when its arrays are not as they must."""
        given = self._block_layout.bundle(block)
        pieces = [
            None if (part := given.layer(index)) is None else _packed(kind, part)
            for index, kind in enumerate(self._kinds)
        ]
        return self._target.part(Kind(block.kind), pieces)


def _float_form(kind: LayerKind) -> LayerKind:
    if not isinstance(kind, AttentionKind):
        return kind
    scheme = LayerScheme(kind.scheme.shape, TensorScheme(), TensorScheme())
    return replace(kind, scheme=scheme, path=None) if kind.scheme.is_packed else kind


def _packed(kind: LayerKind, pieces: Pieces) -> Pieces:
    if not isinstance(kind, AttentionKind) or not kind.scheme.is_packed:
        return pieces
    keys, values = pieces
    return (*kind.scheme.keys.pack(keys), *kind.scheme.values.pack(values))
