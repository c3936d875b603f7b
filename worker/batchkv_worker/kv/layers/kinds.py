"""The kind of each layer of a model: keys and values under a scheme, or a state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat

import mlx.core as mx

from batchkv_worker.kv.attention.paths import LayerAttention, Path, in_slots
from batchkv_worker.kv.backends.contract import Backend, ChunkKernels, RecordKernels
from batchkv_worker.kv.kernels.layout import WORD_BYTES
from batchkv_worker.kv.layers.attention_prefill import AttentionPrefill
from batchkv_worker.kv.layers.attention_slots import AttentionSlots
from batchkv_worker.kv.layers.contract import LayerKind
from batchkv_worker.kv.layers.discover import AttentionShape, Leaf
from batchkv_worker.kv.layers.record_slots import RecordSlots
from batchkv_worker.kv.layers.state import StateKind
from batchkv_worker.kv.schemes.packing import LayerScheme
from batchkv_worker.kv.types import Pieces, Window


@dataclass(frozen=True, slots=True)
class DecodeWay:
    """How a layer decodes; the fields are those of ``AttentionKind``."""

    path: Path | None = None
    has_fused: bool = True
    records: RecordKernels | None = None
    chunks: ChunkKernels | None = None


@dataclass(frozen=True, slots=True)
class AttentionKind(LayerKind):
    """Keys and values under a scheme, of all tokens or of the last ``span`` of them.

    ``dtype``: of dense keys and values. ``path``: how decode computes attention; None leaves it to
    the model, on dense arrays.
    ``has_fused`` is as in ``LayerAttention``. ``is_read``: whether the model may read the dense
    arrays that its caches return, where it leaves attention to them (``stand_ins``). ``records``:
    the kernels of the path ``kernel``; ``chunks``: those that pack chunks of prompts.
    """

    backend: Backend
    scheme: LayerScheme
    dtype: mx.Dtype
    span: Window = None
    path: Path | None = None
    has_fused: bool = True
    is_read: bool = True
    records: RecordKernels | None = field(default=None, compare=False)
    chunks: ChunkKernels | None = field(default=None, compare=False)

    @property
    def window(self) -> Window:
        return self.span

    @property
    def has_state(self) -> bool:
        return False

    @property
    def bytes_per_token(self) -> int:
        if self.records is not None:
            return self.scheme.shape.num_heads * self.records.layout.words * WORD_BYTES
        return in_slots(self.scheme, self.path).bytes_per_token(self.dtype.size)

    @property
    def bytes_per_row(self) -> int:
        return 0

    def prefill(self, capacity: int, chunk_tokens: int) -> AttentionPrefill:
        layer = LayerAttention(self.backend, self.scheme, self.dtype)
        return AttentionPrefill(
            layer, self.span, capacity, chunk_tokens, is_read=self.is_read, kernels=self.chunks
        )

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
        layer = LayerAttention(
            self.backend,
            in_slots(self.scheme, self.path),
            self.dtype,
            self.path or "fused",
            self.has_fused,
            self.records,
        )
        answers, is_read = self.path is not None, self.is_read
        slots = AttentionSlots if self.records is None else RecordSlots
        return slots(self.scheme, self.span, layer, answers=answers, is_read=is_read)

    def __str__(self) -> str:
        return "full attention" if self.span is None else f"window of {self.span}"


def kinds_of(
    backend: Backend,
    leaves: Iterable[Leaf],
    dtype: mx.Dtype,
    schemes: Sequence[LayerScheme],
    ways: Iterable[DecodeWay] | None = None,
) -> tuple[LayerKind, ...]:
    """One for each leaf of a model's caches.

    ``schemes`` and ``ways`` are of its layers with keys and values, in order. Without ``ways`` the
    model attends itself, on dense arrays.
    """
    left = zip(schemes, repeat(DecodeWay()) if ways is None else ways, strict=False)
    kinds: list[LayerKind] = []
    for leaf in leaves:
        if isinstance(leaf, AttentionShape):
            scheme, way = next(left)
            what = (scheme, dtype, leaf.window, way.path, way.has_fused)
            kinds.append(AttentionKind(backend, *what, records=way.records, chunks=way.chunks))
        else:
            kinds.append(StateKind(leaf))
    return tuple(kinds)
