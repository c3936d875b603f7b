"""A GPU: launching a kernel costs its host more than the few rows of a step cost the device."""

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
    """What Metal and CUDA have in common."""

    name: str = "gpu"

    def changes(self, model: Any, dtype: mx.Dtype, rows: int) -> Sequence[Change]:
        fused = fused_linear.choose(model, rows)
        return () if fused is None else (fused,)
