"""A fast BLAS for MLX on Linux CPUs.

MLX's CPU wheel for Linux brings the reference BLAS (about 5 GFLOP/s in float32). Symbols of a
library that was loaded earlier with RTLD_GLOBAL come first, so an installed OpenBLAS is used
instead (230-250 GFLOP/s on the same two cores). Call ``load`` before the first ``import mlx.core``.
A Mac does not need this. Without OpenBLAS all works, but slower.
"""

from __future__ import annotations

import ctypes
import sys

_CANDIDATES = ("libopenblas.so.0", "libopenblas.so")


def load() -> str:
    """Load OpenBLAS if it helps and is installed. Returns a phrase for the log: the BLAS in use."""
    if not sys.platform.startswith("linux"):
        return "BLAS: the platform's"
    if "mlx.core" in sys.modules:
        return "BLAS: as loaded with MLX earlier"
    for name in _CANDIDATES:
        try:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return f"BLAS: OpenBLAS ({name})"
    return (
        "BLAS: MLX's reference BLAS, about 50 times slower in float32 than OpenBLAS "
        "(Debian, Ubuntu: apt install libopenblas0-pthread)"
    )
