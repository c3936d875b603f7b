"""Chooses the backend for this machine."""

from __future__ import annotations

from batchkv_worker.kv.backends import device
from batchkv_worker.kv.backends.contract import Backend
from batchkv_worker.kv.backends.cpu.backend import CpuBackend
from batchkv_worker.kv.backends.cuda.backend import CudaBackend
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
