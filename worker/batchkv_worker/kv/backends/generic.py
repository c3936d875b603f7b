"""A device without special features; the other backends inherit from this one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from batchkv_worker.kv.backends.contract import (
    Change,
    ChunkKernels,
    DrawKernel,
    Early,
    Pacing,
    RecordKernels,
    Softmax,
)
from batchkv_worker.kv.backends.launching import Launches
from batchkv_worker.kv.backends.measurements import Measurements
from batchkv_worker.kv.backends.pacing import UNPACED
from batchkv_worker.kv.backends.softmax import MLX_SOFTMAX
from batchkv_worker.kv.schemes.packing import LayerScheme


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that holds ``value``."""
    return -(-value // multiple) * multiple


def largest_power(most: int) -> int:
    """The largest power of two of at most ``most``; 1 for less."""
    return 1 << (max(1, most).bit_length() - 1)


@dataclass(frozen=True, eq=False)
class GenericBackend:
    """Implements ``Backend`` with MLX's own kernels; the model stays as mlx-lm made it."""

    name: str = "generic"
    columns_multiple: int = 1
    history_multiple: int = 1
    rows_multiple: int = 1
    keeps_shapes: bool = False
    has_fused_attention: bool = True
    starts_each_layer: bool = False
    launches_beside: bool = False
    writes_rows_at_once: bool = False
    joins_with_room: bool = False
    copies_values: bool = False
    joins_groups: bool = False
    most_joined: int = 2**26
    replays_steps: bool = False
    spreads_codes: bool = True
    usual_chunk: int = 1024
    largest_chunk: int = 2048
    chunk_steps: float = 0.0
    chunk_seconds: float = 0.0
    measures_chunk: bool = True
    measurements: Measurements = field(default_factory=Measurements, repr=False)

    def padded_rows(self, rows: int) -> int:
        return round_up(rows, self.rows_multiple)

    def padded_width(self, tokens: int) -> int:
        return round_up(tokens, self.columns_multiple)

    def reads_whole(self, visible: int, stored: int) -> bool:
        return False

    def softmax(self, dtype: mx.Dtype) -> Softmax:
        return MLX_SOFTMAX

    def attention(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
    ) -> mx.array:
        attention = mx.fast.scaled_dot_product_attention
        return attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)

    def padded_chunk(self, rows: int, length: int, columns: int, numbers: int) -> tuple[int, int]:
        return rows, 0

    def plans_attention(self, dtype: mx.Dtype, size: int) -> bool:
        return False

    def attended_shape(
        self, rows: int, length: int, columns: int, numbers: int
    ) -> tuple[int, int, int]:
        return rows, length, columns

    def pacing(self, launches: Launches) -> Pacing:
        return UNPACED

    def begin_step(self, offsets: mx.array) -> None:
        """Does nothing: this backend keeps no state of a step."""

    def unpack_weights(self, model: Any, dtype: mx.Dtype, *, has_room: bool = False) -> int:
        return 0

    def compile_early(self, model: Any, dtype: mx.Dtype) -> Early | None:
        return None

    def changes(self, model: Any, dtype: mx.Dtype, rows: int) -> Sequence[Change]:
        return ()

    def draw_kernel(self) -> DrawKernel | None:
        return None

    def record_kernels(
        self, scheme: LayerScheme, lines: int, dtype: mx.Dtype
    ) -> RecordKernels | None:
        return None

    def chunk_kernels(self, scheme: LayerScheme, dtype: mx.Dtype) -> ChunkKernels | None:
        return None
