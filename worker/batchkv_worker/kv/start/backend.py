"""Chooses the backend for this machine, and tells what it has changed in a model."""

from __future__ import annotations

from typing import Any

from batchkv_worker.kv.backends import device
from batchkv_worker.kv.backends.contract import Backend
from batchkv_worker.kv.backends.cpu.backend import CpuBackend
from batchkv_worker.kv.backends.cuda.backend import CudaBackend
from batchkv_worker.kv.backends.gpu import residual_blocks, rotary_heads
from batchkv_worker.kv.backends.measurements import Measurements
from batchkv_worker.kv.backends.metal.backend import MetalBackend


def choose_backend(measurements: Measurements | None = None) -> Backend:
    """The backend for the device that MLX computes on by default. Each engine has its own.

    Without ``measurements`` its results are not stored.
    """
    kind, kept = device.kind(), measurements or Measurements()
    if kind == "cpu":
        return CpuBackend(measurements=kept)
    return CudaBackend(measurements=kept) if kind == "cuda" else MetalBackend(measurements=kept)


def rotary_in_use(model: Any) -> tuple[int, bool]:
    """How many layers have norms and positions by one kernel, and whether chunks have it, too."""
    return rotary_heads.in_use(model)


def num_residual_blocks(model: Any) -> int:
    """How many blocks have their residual sums and norms by one kernel."""
    return residual_blocks.num_blocks(model)
