"""The prompts that are computed together, in all layers: a group of prefill rows."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from batchkv_worker.kv.backends.contract import Backend
from batchkv_worker.kv.backends.launching import AT_ONCE, Launches
from batchkv_worker.kv.layers.attention_prefill import AttentionPrefill
from batchkv_worker.kv.layers.contract import Chunk, LayerKind, PrefillLayer
from batchkv_worker.kv.layers.state import StatePrefill
from batchkv_worker.kv.types import Pieces


class PrefillRows:
    """One ``PrefillLayer`` for each leaf of the model's caches."""

    def __init__(
        self,
        backend: Backend,
        kinds: Sequence[LayerKind],
        capacity: int,
        chunk_tokens: int,
        launches: Launches = AT_ONCE,
    ) -> None:
        """For prompts of up to ``capacity`` tokens in chunks of up to ``chunk_tokens``.

        ``launches`` starts layers of a chunk while the next ones are built, where a backend wants
        that. Then nothing else may be computed between ``begin`` and ``start``.
        """
        self.kinds = kinds
        self.capacity = capacity
        self.joins_with_room = backend.joins_with_room
        self.layers: list[PrefillLayer] = [kind.prefill(capacity, chunk_tokens) for kind in kinds]
        self._pacing = backend.pacing(launches)
        for layer in self.layers:
            if isinstance(layer, AttentionPrefill):
                layer.pacing = self._pacing

    def begin(self, chunk: Chunk) -> None:
        """Prepare all layers for the chunk that the model computes next."""
        self._pacing.begin()
        for layer in self.layers:
            layer.begin(chunk)

    def end(self) -> None:
        """End the chunk in all layers, after its graph is built."""
        for layer in self.layers:
            layer.end()

    def start(self) -> None:
        """After ``end``: start to compute all that is not started yet."""
        self._pacing.start(self.arrays)

    def row(self, index: int, length: int, prefix_tokens: int = 0) -> list[Pieces]:
        """The pieces that slots need of a row after its ``length`` tokens, with a prefix or not."""
        return [layer.row(index, length, prefix_tokens) for layer in self.layers]

    def block(self, index: int, start: int, end: int, count: int = 1) -> list[Pieces | None]:
        """Tokens [start, end) of rows in every layer; None from layers without a time axis."""
        return [layer.block(index, start, end, count) for layer in self.layers]

    def states(self, index: int) -> list[Pieces | None]:
        """A row's states as they are now; None from layers that keep tokens."""
        return [
            layer.state(index) if isinstance(layer, StatePrefill) else None for layer in self.layers
        ]

    @property
    def arrays(self) -> list[mx.array]:
        """The arrays to evaluate, so that the last chunk is computed."""
        return [array for layer in self.layers for array in layer.arrays]
