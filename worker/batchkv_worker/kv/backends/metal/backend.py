"""Metal: a buffer is used again only for a request of nearly its size, so sizes stay the same.

MLX's pool hands a freed buffer out again if it is at least as large as the request, and smaller
than twice the request and than the request and two pages of 16 KiB. Dense copies of packed keys and
values that grow by one column a step would never be served from the pool: at 32 rows of a model of
4B parameters, about 600 MB would be newly allocated at each step.

Nothing here was measured on a Mac. The constants follow from MLX's sources and from bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from batchkv_worker.kv.backends.contract import RecordKernels
from batchkv_worker.kv.backends.generic import round_up
from batchkv_worker.kv.backends.gpu.backend import GpuBackend, decode_kernels
from batchkv_worker.kv.kernels.draw import DrawKernel
from batchkv_worker.kv.kernels.launch import Launch, metal_launch
from batchkv_worker.kv.schemes.packing import LayerScheme

COLUMNS = 64  # a step's columns are multiples of this: 64 steps have the same shapes
FLAT_FROM, TILE_ROWS = 10, 32  # rows from which, and up to which, a product costs the same
HALF_TILE_ROWS = 16
VISIBLE, STORED = 3, 4  # whole buffers are dequantized if so many cells are read of so many


@dataclass(frozen=True, eq=False)
class MetalBackend(GpuBackend):
    """Implements ``Backend``: what is allocated at a step has the sizes of the step before."""

    name: str = "metal"
    columns_multiple: int = COLUMNS
    keeps_shapes: bool = True

    def padded_rows(self, rows: int) -> int:
        """Below 10 rows MLX multiplies row by row, so that each row costs; none is added.

        From 10 to 32 rows a quantized product computes one tile of 32 rows and costs the same; a
        33rd row costs another tile. Attention and sampling cost something for each row, so 16 rows
        come before 32.
        """
        if rows < FLAT_FROM:
            return rows
        return HALF_TILE_ROWS if rows <= HALF_TILE_ROWS else round_up(rows, TILE_ROWS)

    def reads_whole(self, visible: int, stored: int) -> bool:
        """Where three quarters of a buffer are read.

        MLX dequantizes what lies in one piece, and copies everything else first. With ``p`` bytes a
        packed number and ``d`` a dense one, a slice costs ``3p + 2d`` for each number that is read:
        its copy read and written, read again, written dense, and read. A whole buffer costs ``p +
        d`` for each number that is stored, and ``d`` for each that is read. So the whole is cheaper
        from ``(p + d) / (3p + d)`` on: 0.59 for 8 bits, 0.70 for 4 bits, 0.74 for 3.
        """
        return visible * STORED >= stored * VISIBLE

    def launch(self) -> Launch | None:
        return metal_launch

    def draw_kernel(self) -> DrawKernel | None:
        return DrawKernel(metal_launch)

    def record_kernels(
        self, scheme: LayerScheme, lines: int, dtype: mx.Dtype
    ) -> RecordKernels | None:
        return decode_kernels(scheme, lines, dtype, metal_launch)
