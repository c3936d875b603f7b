"""Loads a fast BLAS before any test here imports MLX, which would bind its own."""

from __future__ import annotations

from batchkv_worker.kv.backends import blas

blas.load()
