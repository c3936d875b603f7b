"""A GPU, whose host takes longer to launch a kernel than the device takes for a step's few rows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from batchkv_worker.kv.backends.contract import Change, ChunkKernels, RecordKernels
from batchkv_worker.kv.backends.generic import GenericBackend, round_up
from batchkv_worker.kv.backends.gpu import fused_linear, fused_rotary, residual_blocks
from batchkv_worker.kv.backends.gpu.turned_weights import TurnWeights
from batchkv_worker.kv.kernels.chunk import ChunkKernel
from batchkv_worker.kv.kernels.decode import DecodeKernels
from batchkv_worker.kv.kernels.launch import Launch
from batchkv_worker.kv.kernels.layout import RecordLayout
from batchkv_worker.kv.schemes.packing import LayerScheme

log = logging.getLogger("batchkv.engine")

WIDTHS = (64, 32, 16, 8)  # prompts are as wide as a multiple of one of these
PADDED_SHARE = 8  # of a prompt's width, one in so many columns is padding at most


@dataclass(frozen=True, eq=False)
class GpuBackend(GenericBackend):
    """The common part of Metal and CUDA."""

    name: str = "gpu"
    history_multiple: int = 1024
    writes_rows_at_once: bool = True
    copies_values: bool = True
    replays_steps: bool = True

    def changes(self, model: Any, dtype: mx.Dtype, rows: int) -> Sequence[Change]:
        linears = fused_linear.choose(model, rows, self.measurements)
        found: list[Change | None] = [linears]
        if (launch := self.launch()) is not None:
            groups = linears.groups if linears is not None else ()
            found.append(fused_rotary.choose(model, rows, launch, self.measurements, groups))
            found.append(residual_blocks.choose(model, rows, launch, self.measurements))
        found.append(TurnWeights())
        return tuple(change for change in found if change is not None)

    def padded_width(self, tokens: int) -> int:
        """Prefill is limited by arithmetic, and padding is computed as tokens are.

        So an eighth of a short prompt is added at most. Widths of 512 and more are multiples of 64.
        """
        few = tokens // PADDED_SHARE
        multiple = next((width for width in WIDTHS if width <= few), WIDTHS[-1])
        return round_up(tokens, multiple)

    def launch(self) -> Launch | None:
        """Makes our own kernels in the device's language; None where there is none."""
        return None

    def chunk_kernels(self, scheme: LayerScheme, dtype: mx.Dtype) -> ChunkKernels | None:
        launch = self.launch()
        if launch is None:
            return None
        try:
            return ChunkKernel.of(RecordLayout.of(scheme, dtype), launch)
        except ValueError as reason:
            log.debug("no kernel packs chunks: %s", reason)
            return None


def decode_kernels(
    scheme: LayerScheme,
    lines: int,
    dtype: mx.Dtype,
    launch: Launch,
    *,
    matrices: bool = False,
    counts: bool = False,
) -> RecordKernels | None:
    """The kernels of such layers; None where there are none for their sizes.

    ``matrices``: with products of matrices, where there are such kernels for the scheme;
    ``counts``: with threadgroups that are counted, where one kernel runs after the other.
    """
    for form in (True, False) if matrices else (False,):
        try:
            layout = RecordLayout.of(scheme, dtype)
            return DecodeKernels.of(layout, lines, launch, matrices=form, counts=counts)
        except ValueError as reason:
            log.debug("no kernel over records: %s", reason)
    return None
