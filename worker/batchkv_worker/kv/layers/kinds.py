"""The kind of a layer that keeps keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from batchkv_worker.kv.attention import paths as attention
from batchkv_worker.kv.layers.attention_prefill import AttentionPrefill
from batchkv_worker.kv.layers.attention_slots import AttentionSlots
from batchkv_worker.kv.layers.contract import LayerKind
from batchkv_worker.kv.schemes.packing import LayerScheme
from batchkv_worker.kv.slots.layouts import Window
from batchkv_worker.kv.types import Pieces


@dataclass(frozen=True, slots=True)
class AttentionKind(LayerKind):
    """Keys and values under a scheme, of all tokens or of the last ``span`` of them.

    ``dtype`` is what dense keys and values have. ``path`` is how decode computes attention; None
    leaves it to the model, on dense arrays.
    """

    scheme: LayerScheme
    dtype: mx.Dtype
    span: Window = None
    path: attention.Path | None = None

    @property
    def window(self) -> Window:
        return self.span

    @property
    def has_state(self) -> bool:
        return False

    @property
    def bytes_per_token(self) -> int:
        return attention.in_slots(self.scheme, self.path).bytes_per_token(self.dtype.size)

    @property
    def bytes_per_row(self) -> int:
        return 0

    def prefill(self, capacity: int, chunk_tokens: int) -> AttentionPrefill:
        return AttentionPrefill(self.scheme, self.span, self.dtype, capacity, chunk_tokens)

    def template(self, num_tokens: int) -> Pieces:
        shape = self.scheme.shape
        keys, values = (
            scheme.pack(mx.zeros((1, shape.num_heads, num_tokens, size), self.dtype))
            for scheme, size in (
                (self.scheme.keys, shape.key_size),
                (self.scheme.values, shape.value_size),
            )
        )
        return (*keys, *values)

    def slots(self) -> AttentionSlots:
        return AttentionSlots(self.scheme, self.span, self.dtype, self.path)

    def __str__(self) -> str:
        return "full attention" if self.span is None else f"window of {self.span}"
