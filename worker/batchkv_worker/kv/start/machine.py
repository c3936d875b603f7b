"""The facts on which measurements depend: device, system, MLX, its variables, and our kernels."""

from __future__ import annotations

import os
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mlx.core as mx

from batchkv_worker.kv.backends import device, mlx_kernels
from batchkv_worker.kv.backends.compare import rounds_float32
from batchkv_worker.kv.kernels.body import sources_digest

# Each of these variables changes how fast MLX is, or how exact; not where it keeps its kernels, and
# how many plans of attention.
_VARIABLES = ("MLX_", "AGX_", "OPENBLAS_", "OMP_", "CUDA_VISIBLE_DEVICES")
_OTHERS = (
    mlx_kernels.VARIABLE,
    "MLX_ENABLE_CACHE_THRASHING_CHECK",
    "MLX_CUDA_SDPA_CACHE_SIZE",
)
_DRIVER = Path("/proc/driver/nvidia/version")


def machine_facts(blas: str) -> dict[str, Any]:
    """JSON that is equal as long as measurements of this machine may be used again.

    ``blas`` names the library that multiplies on a CPU.
    """
    info = mx.device_info()
    return {
        "chip": str(info.get("device_name", "")),
        "architecture": str(info.get("architecture", "")),
        "device": str(mx.default_device()),
        "system": " ".join(os.uname()[:1] + os.uname()[2:4]),
        "driver": _driver(),
        "cpus": device.num_cpus(),
        "blas": blas,
        "mlx": mx.__version__,
        "mlx_lm": _version("mlx-lm"),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_VARIABLES) and name not in _OTHERS
        },
        # Checked answers hold only for the kernels that gave them. CPUs use none.
        **({} if device.kind() == "cpu" else {"kernels": sources_digest()}),
    }


@cache
def is_rounded() -> bool:
    """Whether the device that serves rounds float32 products; see ``compare.rounds_float32``."""
    return rounds_float32(str(mx.device_info().get("architecture", "")), os.environ)


def memory_bytes() -> int:
    """Bytes of the device's memory, which on a Mac and on a CPU is the machine's."""
    info = mx.device_info()
    for name in ("memory_size", "total_memory"):
        if isinstance(size := info.get(name), int) and size > 0:
            return size
    return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _driver() -> str:
    """NVIDIA's driver, which compiles kernels; elsewhere the system's version says it."""
    try:
        return _DRIVER.read_text("utf-8").splitlines()[0]
    except (OSError, ValueError, IndexError):
        return ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
