"""Which backend serves on this machine."""

from __future__ import annotations

from batchkv_worker.kv.backends import device
from batchkv_worker.kv.backends.contract import Backend
from batchkv_worker.kv.backends.cpu.backend import CpuBackend
from batchkv_worker.kv.backends.cuda.backend import CudaBackend
from batchkv_worker.kv.backends.metal.backend import MetalBackend


def choose_backend() -> Backend:
    """For the device that MLX computes on by default. One engine has one of its own."""
    kind = device.kind()
    if kind == "cpu":
        return CpuBackend()
    return CudaBackend() if kind == "cuda" else MetalBackend()
