"""A CPU. It has no fused kernel; on x86, MLX's backend is slow at much that a GPU does well.

Every piece here can be measured or named: None measures whether it is faster on this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from batchkv_worker.kv.backends.contract import Change, Softmax
from batchkv_worker.kv.backends.cpu import causal_tiles, exp2, rope_cache, swiglu
from batchkv_worker.kv.backends.cpu.rope_cache import CacheRope, RopeTables
from batchkv_worker.kv.backends.cpu.softmax import Exp2Softmax
from batchkv_worker.kv.backends.generic import GenericBackend
from batchkv_worker.kv.backends.measurements import YES_OR_NO

_EXP2_SOFTMAX = Exp2Softmax()


@dataclass(frozen=True, eq=False)
class CpuBackend(GenericBackend):
    """Implements ``Backend`` for models in float32; in half precision MLX's own kernels serve.

    MLX's CPU backend holds about a hundred operations, and makes the host wait until no more than
    these are left. They take less time than the host needs to build the next step, so each layer of
    a step is started as soon as it is built.
    """

    name: str = "cpu"
    has_fused_attention: bool = False
    starts_each_layer: bool = True
    joins_with_room: bool = True
    usual_chunk: int = 512
    measures_chunk: bool = False  # sizes make little difference, and measuring takes long
    uses_exp2: bool | None = None
    uses_rope_cache: bool | None = None
    tables: RopeTables = field(default_factory=RopeTables, repr=False)

    def softmax(self, dtype: mx.Dtype) -> Softmax:
        return _EXP2_SOFTMAX if self._uses_exp2(dtype) else super().softmax(dtype)

    def attention(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
    ) -> mx.array:
        if not isinstance(mask, str):
            return super().attention(queries, keys, values, scale, mask, sinks)
        softmax = _EXP2_SOFTMAX if self._uses_exp2(queries.dtype) else None
        return causal_tiles.attend(queries, keys, values, scale, sinks, softmax)

    def begin_step(self, offsets: mx.array) -> None:
        self.tables.begin(offsets)

    def changes(self, model: Any, dtype: mx.Dtype, rows: int) -> Sequence[Change]:
        if dtype != mx.float32:
            return ()
        found: list[Change] = []
        if self._uses_exp2(dtype) and swiglu.is_used(model):
            found.append(swiglu.Exp2Swiglu())
        if self._uses_rope_cache():
            found.append(CacheRope(self.tables))
        return found

    def _uses_rope_cache(self) -> bool:
        if self.uses_rope_cache is not None:
            return self.uses_rope_cache
        return self.measurements.of("rope cache is faster", rope_cache.is_faster, YES_OR_NO)

    def _uses_exp2(self, dtype: mx.Dtype) -> bool:
        if dtype != mx.float32:
            return False
        if self.uses_exp2 is not None:
            return self.uses_exp2
        return self.measurements.of("exp2 is faster", exp2.is_faster, YES_OR_NO)
