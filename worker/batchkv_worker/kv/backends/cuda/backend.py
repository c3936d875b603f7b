"""The backend for CUDA, where new shapes need new kernels, and each launch costs host time."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from batchkv_worker.kv.backends import device
from batchkv_worker.kv.backends.contract import Early, Pacing, RecordKernels
from batchkv_worker.kv.backends.cuda import dense_weights, early_products
from batchkv_worker.kv.backends.generic import round_up
from batchkv_worker.kv.backends.gpu.backend import GpuBackend, decode_kernels
from batchkv_worker.kv.backends.launching import Launches
from batchkv_worker.kv.backends.pacing import LayersAhead
from batchkv_worker.kv.kernels.compiled_launch import launch_for
from batchkv_worker.kv.kernels.draw import DrawKernel
from batchkv_worker.kv.kernels.launch import Launch
from batchkv_worker.kv.schemes.packing import LayerScheme

MOST_PADDED = 2**26  # numbers of keys: 128 MiB in half precision
FEW_TOKENS = 1024  # rows times columns to which few rows are padded: they cost nothing more
MOST_ROWS = 8  # to which few rows are padded
MOST_SIZE, SIZE_MULTIPLE = 128, 8  # of heads whose attention MLX plans
LENGTHS = (128, 256, 384, 512, 768, 1024)  # to which short prompts are padded; then multiples of
LENGTHS_MULTIPLE = 512
KEYS_MULTIPLE = 64  # of keys to which chunks with history are padded


@dataclass(frozen=True, eq=False)
class CudaBackend(GpuBackend):
    """Implements ``Backend``: shapes are rounded, and the host waits for the device."""

    name: str = "cuda"
    columns_multiple: int = 64
    rows_multiple: int = 8
    launches_beside: bool = True
    joins_groups: bool = True  # the host launches a chunk in the time of 500 tokens and more
    most_joined: int = 2**27  # prompts of 64 slots behind a few hundred tokens, in one chunk
    usual_chunk: int = 2048
    largest_chunk: int = 4096  # a slow host may launch 2,048 later than an H100 ends them
    chunk_seconds: float = 0.01  # measured with an H100
    chunk_steps: float = 2.0  # the host starts twice as many kernels for one as for a step

    def attention(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
    ) -> mx.array:
        """MLX's, for numbers of rows and tokens that come again.

        MLX plans attention for each shape anew, which takes 65 ms on an H200. So small chunks of
        prompts get rows of zeros up to a power of two, and short ones up to ``MOST_ROWS``. Rows get
        tokens of zeros behind their own, too, which none of their own attends to: up to one of few
        lengths, or, with history, up to a multiple of columns. Then queries of zeros come before
        their own, as many as the history has columns after a multiple. The rest of the model
        computes none of them.
        """
        rows, length, columns = queries.shape[0], queries.shape[2], keys.shape[2]
        padded, wanted, to = rows, length, columns
        if not isinstance(mask, mx.array):
            numbers = keys[0].size // columns
            padded, wanted, to = self.attended_shape(rows, length, columns, numbers)
        if mask != "causal":  # every column would be seen
            wanted, to = length, columns
        more = to - columns
        before = wanted - length - more
        if padded > rows or more:
            width = [(0, padded - rows), (0, 0), (0, more), (0, 0)]
            keys, values = (mx.pad(one, width) for one in (keys, values))
        if padded > rows or more or before:
            width = [(0, padded - rows), (0, 0), (before, more), (0, 0)]
            queries = mx.pad(queries, width)
        elif mask == "causal" and keys.size <= MOST_PADDED:
            # A plan is for strides, too, and a chunk may be a part of a buffer of any size.
            keys, values = mx.contiguous(keys), mx.contiguous(values)
        out = super().attention(queries, keys, values, scale, mask, sinks)
        if (out.shape[0], out.shape[2]) == (rows, length):
            return out
        return out[:rows, :, before : before + length]

    def padded_chunk(self, rows: int, length: int, columns: int, numbers: int) -> tuple[int, int]:
        few = min(MOST_ROWS, FEW_TOKENS // max(length, columns))
        padded = 1 << (max(rows, few) - 1).bit_length()
        is_first = length == columns
        to = rounded_length(length) if is_first else round_up(columns, KEYS_MULTIPLE)
        more = to - columns
        is_small = length > 1 and padded * numbers * (columns + more) <= MOST_PADDED
        return (padded, more) if is_small else (rows, 0)

    def plans_attention(self, dtype: mx.Dtype, size: int) -> bool:
        """For other numbers and heads MLX has kernels of its own, which keep scores in memory."""
        is_half = dtype in (mx.float16, mx.bfloat16)
        return is_half and size <= MOST_SIZE and size % SIZE_MULTIPLE == 0

    def attended_shape(
        self, rows: int, length: int, columns: int, numbers: int
    ) -> tuple[int, int, int]:
        padded, more = self.padded_chunk(rows, length, columns, numbers)
        is_rounded = (columns + more) % KEYS_MULTIPLE == 0
        before = (columns - length) % KEYS_MULTIPLE if is_rounded else 0
        return padded, before + length + more, columns + more

    def unpack_weights(self, model: Any, dtype: mx.Dtype, *, has_room: bool = False) -> int:
        most_bytes = None if has_room else device.free_bytes() // 2
        return dense_weights.unpack(model, dtype, most_bytes)

    def compile_early(self, model: Any, dtype: mx.Dtype) -> Early | None:
        return early_products.begin(model, dtype)

    def pacing(self, launches: Launches) -> Pacing:
        return LayersAhead(launches)

    def launch(self) -> Launch:
        return launch_for(self.measurements.home, device.code_folder())

    def draw_kernel(self) -> DrawKernel | None:
        return DrawKernel(self.launch())

    def record_kernels(
        self, scheme: LayerScheme, lines: int, dtype: mx.Dtype
    ) -> RecordKernels | None:
        what = scheme, lines, dtype, self.launch()
        return decode_kernels(*what, matrices=True, counts=runs_in_order())


def runs_in_order() -> bool:
    """Whether one kernel runs after the other.

    In a CUDA graph, MLX lets kernels run at once if none reads what another gives.
    """
    return os.environ.get("MLX_USE_CUDA_GRAPHS") == "0"


def rounded_length(length: int) -> int:
    """The number of tokens to which rows of ``length`` tokens are padded."""
    fitting = (one for one in LENGTHS if one >= length)
    return next(fitting, -(-length // LENGTHS_MULTIPLE) * LENGTHS_MULTIPLE)
