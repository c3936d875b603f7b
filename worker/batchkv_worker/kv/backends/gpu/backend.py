"""A GPU, whose host takes longer to launch a kernel than the device takes for a step's few rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from batchkv_worker.kv.backends.contract import Change
from batchkv_worker.kv.backends.generic import GenericBackend
from batchkv_worker.kv.backends.gpu import fused_linear


@dataclass(frozen=True, eq=False)
class GpuBackend(GenericBackend):
    """The common part of Metal and CUDA."""

    name: str = "gpu"

    def changes(self, model: Any, dtype: mx.Dtype, rows: int) -> Sequence[Change]:
        fused = fused_linear.choose(model, rows, self.measurements)
        return () if fused is None else (fused,)
