"""Which kernels over records the GPUs' backends offer."""

from __future__ import annotations

import mlx.core as mx
import pytest

from batchkv_worker.kv.backends.cuda.backend import CudaBackend
from batchkv_worker.kv.backends.generic import GenericBackend
from batchkv_worker.kv.backends.metal.backend import MetalBackend
from batchkv_worker.kv.kernels.decode import DecodeKernels
from batchkv_worker.kv.schemes.packing import LayerShape, fit_model
from batchkv_worker.kv.schemes.spec import SchemeSpec


@pytest.mark.parametrize(("graphs", "counts"), [("0", True), ("1", False), (None, False)])
def test_cuda_counts_threadgroups_where_kernels_run_in_order(
    graphs: str | None, counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a CUDA graph two kernels that share counters could run at once. Metal counts none."""
    monkeypatch.delenv("MLX_USE_CUDA_GRAPHS")
    if graphs is not None:
        monkeypatch.setenv("MLX_USE_CUDA_GRAPHS", graphs)
    scheme = fit_model(SchemeSpec.parse("affine8"), [LayerShape(2, 128, 128)])[0]
    for backend, wanted in ((CudaBackend(), counts), (MetalBackend(), False)):
        found = backend.record_kernels(scheme, 4, mx.bfloat16)
        assert isinstance(found, DecodeKernels)
        assert (found.counters is not None) == wanted


@pytest.mark.parametrize(
    ("name", "dtype", "size", "on_cuda"),
    [
        ("affine8", mx.bfloat16, 128, True),
        ("turbo3.5", mx.float16, 64, True),
        ("affine8", mx.float32, 128, False),
        ("mxfp4", mx.bfloat16, 128, False),
        ("affine8", mx.bfloat16, 36, None),
    ],
)
def test_cuda_multiplies_matrices(
    name: str, dtype: mx.Dtype, size: int, on_cuda: bool | None
) -> None:
    """Where there are such kernels; Metal has the others. None: for no such layer."""
    scheme = fit_model(SchemeSpec.parse(name), [LayerShape(2, size, size)])[0]
    both = [one.record_kernels(scheme, 4, dtype) for one in (CudaBackend(), MetalBackend())]
    for found, wanted in zip(both, (on_cuda, None if on_cuda is None else False), strict=True):
        assert (found is None) == (wanted is None)
        if found is not None:
            assert isinstance(found, DecodeKernels)
            assert found.matrices == wanted
    assert GenericBackend().record_kernels(scheme, 4, dtype) is None
