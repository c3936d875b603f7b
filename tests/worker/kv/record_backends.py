"""Backends whose decode slots keep records, for tests on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from batchkv_worker.kv.backends.contract import RecordKernels
from batchkv_worker.kv.backends.cpu.backend import CpuBackend
from batchkv_worker.kv.backends.generic import GenericBackend
from batchkv_worker.kv.kernels.layout import RecordLayout
from batchkv_worker.kv.kernels.plain import PlainKernels
from batchkv_worker.kv.schemes.packing import LayerScheme

Make = Callable[[RecordLayout, int], RecordKernels]


def plain(layout: RecordLayout, lines: int) -> RecordKernels:
    """Plain operations of MLX."""
    return PlainKernels(layout)


@dataclass(frozen=True, eq=False)
class WithRecords(GenericBackend):
    """A device with kernels over records, of any dtype and number of query heads."""

    make: Make = plain

    def record_kernels(self, scheme: LayerScheme, lines: int, dtype: mx.Dtype) -> RecordKernels:
        return self.make(RecordLayout.of(scheme, dtype), lines)


@dataclass(frozen=True, eq=False)
class CpuWithRecords(CpuBackend):
    """The same with all that is special on x86."""

    make: Make = plain

    def record_kernels(self, scheme: LayerScheme, lines: int, dtype: mx.Dtype) -> RecordKernels:
        return self.make(RecordLayout.of(scheme, dtype), lines)


def x86_with_records(**changes: Any) -> CpuWithRecords:
    """Nothing is measured for it."""
    return CpuWithRecords(**{"uses_exp2": True, "uses_rope_cache": True, **changes})
