"""Keys and values of a chunk of prompts, packed and given back by one kernel.

Packing keys, packing values, and giving both back for attention are kernels of their own in MLX;
behind a shared prefix its numbers are given back, too, and copied for each row. A GPU's host takes
longer to launch all these than the device takes for them.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import mlx.core as mx

from batchkv_worker.kv.kernels.body import chunk_body
from batchkv_worker.kv.kernels.launch import Constant, Input, Launch, Output, Run
from batchkv_worker.kv.kernels.layout import Form, RecordLayout, TensorLayout
from batchkv_worker.kv.kernels.variant import UNIT, tensor_constants
from batchkv_worker.kv.types import PackedKV

_SIMD = 32  # threads
_MOST_THREADS = 256  # of a threadgroup, if a head has fewer
MOST_COLUMNS = 65_535  # CUDA's grids have no more in the third dimension


@dataclass(frozen=True, slots=True)
class ChunkKernel:
    """For one layer, whose keys and values are both affine; ``of`` makes it."""

    layout: RecordLayout
    launch: Launch
    runs: dict[Hashable, Run] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, layout: RecordLayout, launch: Launch) -> ChunkKernel:
        """ValueError where there is no kernel for such a layer."""
        for tensor in (layout.keys, layout.values):
            if tensor.form != Form.AFFINE or tensor.size % UNIT:
                raise ValueError(
                    f"no kernel packs chunks of {tensor.size} numbers, {layout.scheme}"
                )
        return cls(layout, launch)

    def pack(self, keys: mx.array, values: Input) -> PackedKV:
        """The parts that the schemes pack, of ``[rows, kv heads, tokens, size]``.

        Keys and values are in the basis of storage, in the layout's dtype. Where values do not lie
        in one piece, they should be a view.
        """
        rows, _, tokens, _ = keys.shape
        return self._packed(self._run(keys, values, None, (rows, tokens), is_dense=False))

    def pack_and_give(
        self, keys: mx.array, values: Input, prefix: PackedKV | None, rows: int, tokens: int
    ) -> tuple[PackedKV, tuple[mx.array, mx.array]]:
        """The parts, and the numbers that the schemes give back for them, for attention.

        These are ``[rows, kv heads, columns, size]``: of the ``prefix``, if there is one (parts of
        one row for all, or of each), then of the ``tokens``. Rows and tokens beyond the given ones
        are zeros. The columns are at most ``MOST_COLUMNS``.
        """
        before = 0 if prefix is None else prefix[0][0].shape[2]
        found = self._run(keys, values, prefix, (rows, before + tokens), is_dense=True)
        return self._packed(found), (found[-2], found[-1])

    def _run(
        self, keys: mx.array, values: Input, prefix: PackedKV | None, grid: tuple[int, int],
        *, is_dense: bool,
    ) -> list[mx.array]:  # fmt: skip
        """``grid``: rows and columns."""
        layout, (rows, columns) = self.layout, grid
        count, kv_heads, tokens, _ = keys.shape
        outputs = [
            output
            for tensor in (layout.keys, layout.values)
            for output in _parts_of(tensor, (count, kv_heads, tokens))
        ]
        if is_dense:
            for tensor in (layout.keys, layout.values):
                outputs.append(((rows, kv_heads, columns, tensor.size), layout.dtype))
        inputs: list[Input] = [keys, values, *(part for one in prefix or () for part in one)]
        key = is_dense, prefix is not None, kv_heads
        run = self.runs.get(key)
        if run is None:
            body = chunk_body(dense=is_dense, behind=prefix is not None)
            run = self.runs[key] = self.launch(body, self._constants(kv_heads))
        _, span, heads = self._sharing(kv_heads)
        return run(inputs, (kv_heads * span, rows, columns), (heads * span, 1, 1), outputs)

    def _constants(self, kv_heads: int) -> tuple[Constant, ...]:
        layout = self.layout
        tensors = tensor_constants("KEY", layout.keys), tensor_constants("VALUE", layout.values)
        lanes, span, heads = self._sharing(kv_heads)
        sharing = ("KEY_LANES", lanes), ("SPAN", span), ("HEADS", heads)
        return ("T", layout.dtype), *tensors[0], *tensors[1], *sharing

    def _sharing(self, kv_heads: int) -> tuple[int, int, int]:
        """Threads of a head's key, threads of a head, and heads of a threadgroup.

        A group of numbers has neighbouring threads of one simdgroup. All threads of a simdgroup do
        the same, so it has keys and values only where both are packed alike.
        """
        keys, values = self.layout.keys, self.layout.values
        lanes, more = keys.size // UNIT, values.size // UNIT
        is_alike = (keys.bits, keys.group) == (values.bits, values.group)
        lanes = _rounded(lanes, keys.group // UNIT if is_alike else _SIMD)
        span = _rounded(lanes + more, keys.group // UNIT if is_alike else _SIMD)
        while _SIMD % span and span % _SIMD:  # heads begin where simdgroups do, or divide one
            span += 1
        if kv_heads * span % _SIMD:
            span = _rounded(span, _SIMD)
        most = max(1, _MOST_THREADS // span)
        fitting = (n for n in range(most, 0, -1) if kv_heads % n == 0 and n * span % _SIMD == 0)
        return lanes, span, next(fitting)

    def _packed(self, found: list[mx.array]) -> PackedKV:
        return tuple(found[:3]), tuple(found[3:6])


def _rounded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _parts_of(tensor: TensorLayout, shape: tuple[int, ...]) -> list[Output]:
    """Shapes and dtypes of a tensor's parts, for vectors in such a shape."""
    groups = (*shape, tensor.num_groups), tensor.dtype
    return [((*shape, tensor.num_code_words), mx.uint32), groups, groups]
