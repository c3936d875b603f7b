"""Attention of decode steps over records, and the records of a step, as a few kernels.

The first kernel attends to 256 columns of a row at once, for all query heads of a KV head. The
second joins these splits, in order, with the partial results of shared prefixes and with sinks. So
the result does not depend on the device's schedule, nor on the columns at which rows begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx

from batchkv_worker.kv.kernels.body import PACK, Body, merge_body, splits_body, unpack_body
from batchkv_worker.kv.kernels.launch import Constant, Launch, Output
from batchkv_worker.kv.kernels.layout import Form, RecordLayout, TensorLayout
from batchkv_worker.kv.kernels.variant import SIMDS, SPLIT, UNIT, Variant
from batchkv_worker.kv.types import PackedKV

_SIMD = 32  # threads
_UNPACK_THREADS = 64


@dataclass(frozen=True, slots=True)
class Partials:
    """Results over shared prefixes, and which of them each row has.

    ``scores`` float32 ``[kv heads, total, lines, 1]``, log-sum-exps; ``values`` ``[kv heads, total,
    lines, size]``, in the basis of storage; ``chain`` int32 ``[rows, depth]``, numbers below
    ``total``, or -1 for none.
    """

    scores: mx.array
    values: mx.array
    chain: mx.array


@dataclass(frozen=True, slots=True)
class DecodeKernels:
    """The kernels of a layer, for one number of query heads a KV head; ``of`` makes them.

    ``matrices``: with products of matrices. The other fields are constants of the kernels.
    """

    variant: Variant
    launch: Launch
    matrices: bool
    splits: tuple[Constant, ...]
    merge: tuple[Constant, ...]
    packing: tuple[Constant, ...]

    @classmethod
    def of(
        cls, layout: RecordLayout, lines: int, launch: Launch, *, matrices: bool = False
    ) -> DecodeKernels:
        """ValueError where there is no kernel for such a layer.

        ``matrices``: with products of matrices, which Metal's dialect does not have.
        """
        variant = Variant.of(layout, lines)
        splits = variant.matrix_splits if matrices else variant.splits
        constants = tuple(splits), tuple(variant.merge), tuple(variant.pack)
        return cls(variant, launch, matrices, *constants)

    @property
    def layout(self) -> RecordLayout:
        return self.variant.layout

    def attend(
        self,
        queries: mx.array,
        records: mx.array,
        bounds: mx.array,
        longest: int,
        scale: float,
        sinks: mx.array | None = None,
        partials: Partials | None = None,
    ) -> mx.array:
        """Attention of ``queries`` ``[rows, heads, 1, size]`` over columns of ``records``.

        Queries are in the basis of storage, and so is the result ``[rows, heads, 1, size]``.
        ``records`` are ``[rows, kv heads, columns, words]``, perhaps of more rows. ``bounds``
        (int32, ``[rows, 2]``, perhaps of more rows, at least 4) are the first column of each row
        and the one after its last; a row without any has the result 0, unless it has ``partials``.
        No row has more than ``longest``. ``sinks`` are ``[heads]``.
        """
        rows, heads, _, _ = queries.shape
        size = self.layout.values.size
        flags = {"prefixes": partials is not None, "sinks": sinks is not None}
        rest, constants = [], []
        if partials is not None:
            rest += [partials.scores, partials.values, partials.chain]
            constants.append(("DEPTH", partials.chain.shape[1]))
        if sinks is not None:
            rest.append(sinks.astype(mx.float32))
        output = (rows, heads, 1, size), self.layout.dtype
        if longest <= SPLIT:
            body = splits_body(matrices=self.matrices, joined=True, **flags)
            given = queries, records, bounds, scale
            return self._attend_splits(body, *given, 1, output, rest, constants)
        splits = self._attend_all(queries, records, bounds, longest, scale)
        body = merge_body(**flags, alone=False)
        inputs, grid = [splits, bounds, *rest], (size, heads, rows)
        (out,) = self.launch(body, inputs, (*self.merge, *constants), grid, (size, 1, 1), [output])
        return out

    def attend_shared(
        self, queries: mx.array, records: mx.array, tokens: int, scale: float
    ) -> tuple[mx.array, mx.array]:
        """Attention of all rows over ``tokens`` columns of ``records`` ``[1, kv heads, ...]``.

        Returns log-sum-exps and results, as ``Partials`` have them.
        """
        rows, heads, _, _ = queries.shape
        kv_heads, size = self.layout.scheme.shape.num_heads, self.layout.values.size
        bounds = mx.array([[0, tokens]] * max(rows, 4), mx.int32)
        shared = mx.broadcast_to(records, (rows, *records.shape[1:]))
        splits = self._attend_all(queries, shared, bounds, tokens, scale)
        body = merge_body(prefixes=False, sinks=False, alone=True)
        shape = kv_heads, rows, self.variant.lines
        outputs: list[Output] = [((*shape, size), self.layout.dtype), ((*shape, 1), mx.float32)]
        grid = size, heads, rows
        inputs = [splits, bounds]
        out, score = self.launch(body, inputs, self.merge, grid, (size, 1, 1), outputs)
        return score, out

    def _attend_all(
        self, queries: mx.array, records: mx.array, bounds: mx.array, longest: int, scale: float
    ) -> mx.array:
        """The splits of all rows, for ``merge_body``."""
        rows, lines = queries.shape[0], self.variant.lines
        kv_heads, splits = self.layout.scheme.shape.num_heads, -(-longest // SPLIT)
        size = self.layout.values.size + 2  # and the highest score, and the sum of weights
        output = (rows, kv_heads, splits, lines, size), mx.float32
        body = splits_body(matrices=self.matrices)
        return self._attend_splits(body, queries, records, bounds, scale, splits, output)

    def _attend_splits(
        self,
        body: Body,
        queries: mx.array,
        records: mx.array,
        bounds: mx.array,
        scale: float,
        splits: int,
        output: Output,
        rest: Sequence[mx.array] = (),
        constants: Sequence[Constant] = (),
    ) -> mx.array:
        kv_heads, threads = self.layout.scheme.shape.num_heads, SIMDS * _SIMD
        inputs = [queries, records, bounds, _scalar(scale), *rest]
        given = (*self.splits, *constants)
        grid = kv_heads * threads, splits, queries.shape[0]
        (found,) = self.launch(body, inputs, given, grid, (threads, 1, 1), [output])
        return found

    def pack(self, keys: mx.array, values: mx.array) -> mx.array:
        """Records ``[rows, kv heads, 1, words]`` of one token a row.

        ``keys`` and ``values`` are ``[rows, kv heads, 1, size]``, in the basis of storage.
        """
        rows, kv_heads = keys.shape[:2]
        units = [self.layout.keys.size // UNIT, self.layout.values.size // UNIT]
        threads = sum(-(-count // _SIMD) * _SIMD for count in units)
        grid = kv_heads * threads, rows, 1
        outputs = [((rows, kv_heads, 1, self.layout.words), mx.uint32)]
        inputs = [keys, values]
        (records,) = self.launch(PACK, inputs, self.packing, grid, (threads, 1, 1), outputs)
        return records

    def unpack(self, records: mx.array) -> PackedKV:
        """The parts of ``records`` ``[rows, kv heads, columns, words]``, as the schemes packed."""
        rows, kv_heads, columns, _ = records.shape
        keys, values = (_parts(one) for one in (self.layout.keys, self.layout.values))
        outputs = [((rows, kv_heads, columns, size), one) for size, one in (*keys, *values)]
        body, threads = unpack_body(len(keys), len(values)), _UNPACK_THREADS
        constants = [*self.variant.record, ("HEADS", kv_heads)]
        grid = threads, columns, rows * kv_heads
        found = self.launch(body, [records], constants, grid, (threads, 1, 1), outputs)
        return tuple(found[: len(keys)]), tuple(found[len(keys) :])


def _parts(tensor: TensorLayout) -> list[tuple[int, mx.Dtype]]:
    """Length and dtype of each part of a tensor."""
    if tensor.form == Form.FLOAT:
        return [(tensor.size, tensor.dtype)]
    codes = tensor.num_code_words, mx.uint32
    if tensor.form == Form.AFFINE:
        return [codes, *[(tensor.num_groups, tensor.dtype)] * 2]
    return [codes, (tensor.num_groups, tensor.dtype if tensor.form == Form.TURBO else mx.uint8)]


@lru_cache(maxsize=64)
def _scalar(number: float) -> mx.array:
    return mx.array([number], mx.float32)
