"""The kind of a layer that keeps keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from batchkv_worker.kv import attention
from batchkv_worker.kv.attention_prefill import AttentionPrefill
from batchkv_worker.kv.attention_slots import AttentionSlots
from batchkv_worker.kv.layer import LayerKind
from batchkv_worker.kv.layouts import Window
from batchkv_worker.kv.schemes import LayerScheme


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
        return self.scheme.bytes_per_token(self.dtype.size)

    @property
    def bytes_per_row(self) -> int:
        return 0

    def prefill(self, capacity: int, chunk_tokens: int) -> AttentionPrefill:
        return AttentionPrefill(self.scheme, self.span, self.dtype, capacity, chunk_tokens)

    def slots(self) -> AttentionSlots:
        return AttentionSlots(self.scheme, self.span, self.dtype, self.path)

    def __str__(self) -> str:
        return "full attention" if self.span is None else f"window of {self.span}"
