"""The backend for CUDA, where new shapes need new kernels, and each launch costs host time."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from batchkv_worker.kv.backends.contract import Pacing, PrefixKernel, RecordKernels
from batchkv_worker.kv.backends.cuda.prefix_kernel import CudaPrefixKernel
from batchkv_worker.kv.backends.gpu.backend import GpuBackend, decode_kernels
from batchkv_worker.kv.backends.pacing import LayersAhead
from batchkv_worker.kv.kernels.launch import cuda_launch
from batchkv_worker.kv.schemes.packing import LayerScheme


@dataclass(frozen=True, eq=False)
class CudaBackend(GpuBackend):
    """Implements ``Backend``: shapes are rounded, and the host waits for the device."""

    name: str = "cuda"
    columns_multiple: int = 64
    rows_multiple: int = 8
    usual_chunk: int = 2048

    def pacing(self) -> Pacing:
        return LayersAhead()

    def prefix_kernel(
        self, scheme: LayerScheme, lines: int, dtype: mx.Dtype
    ) -> PrefixKernel | None:
        kernel = CudaPrefixKernel(lines, dtype)
        return kernel if kernel.fits(scheme.shape) else None

    def record_kernels(
        self, scheme: LayerScheme, lines: int, dtype: mx.Dtype
    ) -> RecordKernels | None:
        return decode_kernels(scheme, lines, dtype, cuda_launch, matrices=True)
