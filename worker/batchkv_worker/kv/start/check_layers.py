"""The layers that are checked and timed at start: by path, and with as many heads as fit."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from batchkv_worker.kv.attention.paths import LayerAttention, Path, paths_of
from batchkv_worker.kv.backends.contract import Backend
from batchkv_worker.kv.schemes.packing import LayerScheme
from batchkv_worker.kv.start.check_tokens import SPARE

MAX_ROWS = 3  # of samples that are checked
_FEW_HEADS = 2  # KV heads of long samples; one alone may have kernels of its own
_NUMBERS = 2**21  # of a tensor, for samples of more heads


def paths_on(
    backend: Backend, scheme: LayerScheme, lines: int, dtype: mx.Dtype, *, with_kernel: bool = True
) -> tuple[Path, ...]:
    """The paths that a backend may take for such layers, the kernel's if it has one."""
    kernel = with_kernel and backend.record_kernels(scheme, lines, dtype) is not None
    return paths_of(scheme, spreads=backend.spreads_codes, kernel=kernel)


def layer_of(
    backend: Backend, kept: LayerScheme, lines: int, dtype: mx.Dtype, path: Path
) -> LayerAttention:
    """A layer whose slots keep parts, or records, of ``kept``."""
    records = backend.record_kernels(kept, lines, dtype) if path == "kernel" else None
    return LayerAttention(backend, kept, dtype, path, records=records)


def few_heads(scheme: LayerScheme, columns: int) -> LayerScheme:
    """The scheme for as many KV heads as a sample may have."""
    shape = scheme.shape
    of_head = MAX_ROWS * (columns + 2 * SPARE) * max(shape.key_size, shape.value_size)
    heads = min(shape.num_heads, max(_FEW_HEADS, _NUMBERS // of_head))
    return replace(scheme, shape=replace(shape, num_heads=heads))


def with_few_heads(layer: LayerAttention, lines: int, columns: int) -> LayerAttention:
    scheme = few_heads(layer.scheme, columns)
    records = layer.records
    if records is not None:
        records = layer.backend.record_kernels(scheme, lines, layer.dtype)
    return replace(layer, scheme=scheme, records=records)
