"""Attention of decode steps over records, and the records of a step, as a few kernels.

A threadgroup attends to a split of a row's columns, for all query heads of a KV head. A second
kernel joins these splits, in order, with the partial results of shared prefixes and with sinks; or
the first one does, where its last threadgroup can know that it is the last. So the result does not
depend on the device's schedule, nor on the columns at which rows begin.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal

import mlx.core as mx

from batchkv_worker.kv.kernels.body import PACK, Body, merge_body, place_rows_body, splits_body
from batchkv_worker.kv.kernels.launch import Constant, Input, Launch, Output, Run, View
from batchkv_worker.kv.kernels.layout import RecordLayout
from batchkv_worker.kv.kernels.variant import UNIT, Variant, float_bits
from batchkv_worker.kv.types import Parts

_SIMD = 32  # threads
_MOST_COUNTED = 8192  # rows times KV heads whose threadgroups are counted

# How splits are joined: each row has one; the last threadgroup does; a kernel of its own does.
Ends = Literal["one", "last", "merge"]


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

    ``matrices``: with products of matrices. A threadgroup of ``threads`` attends to ``split``
    columns. ``counters`` (uint32): zeros with which threadgroups find out which of them is the
    last, of one kernel at a time; None where they cannot. ``runs`` has the kernels that were made.
    """

    variant: Variant
    launch: Launch
    matrices: bool
    split: int
    threads: int
    counters: mx.array | None = field(default=None, repr=False, compare=False)
    runs: dict[Hashable, Run] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        layout: RecordLayout,
        lines: int,
        launch: Launch,
        *,
        matrices: bool = False,
        counts: bool = False,
    ) -> DecodeKernels:
        """ValueError where there is no kernel for such a layer.

        ``matrices``: with products of matrices; ``counts``: with threadgroups that are counted,
        where the device runs one kernel after the other. Metal's dialect has neither.
        """
        variant = Variant.of(layout, lines)
        variant.splits_of(matrices=matrices)
        threads = _SIMD * variant.simds(matrices=matrices)
        counters = mx.zeros((_MOST_COUNTED,), mx.uint32) if counts else None
        if counters is not None:
            mx.eval(counters)  # else each step would make them anew
        split = variant.split(matrices=matrices)
        return cls(variant, launch, matrices, split, threads, counters)

    @property
    def layout(self) -> RecordLayout:
        return self.variant.layout

    @property
    def _merge(self) -> list[Constant]:
        return self.variant.merge(matrices=self.matrices)

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
        ``records`` are ``[rows, kv heads, columns, words]``, perhaps of more rows; columns of a row
        and head lie one after the other, and so do numbers of a query. ``bounds``
        (int32, ``[rows, 2]``, perhaps of more rows, at least 4) are the first column of each row
        and the one after its last; a row without any has the result 0, unless it has ``partials``.
        No row has more than ``longest``. ``sinks`` are ``[heads]``.
        """
        rows, heads, _, _ = queries.shape
        size = self.layout.values.size
        rest = []
        if partials is not None:
            rest += [partials.scores, partials.values, partials.chain]
        if sinks is not None:
            rest.append(sinks.astype(mx.float32))
        outputs: list[Output] = [((rows, heads, 1, size), self.layout.dtype)]
        kv_heads, num_splits = heads // self.variant.lines, self._num_splits(longest)
        ends = _ends(num_splits, self.counters, rows * kv_heads)
        key = ends, partials is not None, sinks is not None, scale
        run = self.runs.get(key) or self._make(key, self._joining(*key))
        if ends == "merge":
            inputs = [self._splits(queries, records, bounds, longest, scale), bounds, *rest]
            return run(inputs, (size, heads, rows), (size, 1, 1), outputs)[0]
        inputs = [queries, records, bounds, *rest]
        if ends == "last":
            assert self.counters is not None
            inputs.insert(3, self.counters)
            outputs.append(self._output_of_splits(rows, num_splits))
        grid = kv_heads * self.threads, num_splits, rows
        return run(inputs, grid, (self.threads, 1, 1), outputs)[0]

    def attend_alone(
        self, queries: mx.array, records: mx.array, bounds: mx.array, longest: int, scale: float
    ) -> tuple[mx.array, mx.array]:
        """Attention as ``attend``, to be joined with more: ``Partials`` with a result a row.

        Records of one row are those of all.
        Returns log-sum-exps ``[kv heads, rows, lines, 1]``, of rows without columns the lowest
        number, and results ``[kv heads, rows, lines, size]``.
        """
        rows, heads, _, _ = queries.shape
        kv_heads, size = self.layout.scheme.shape.num_heads, self.layout.values.size
        splits = self._splits(queries, records, bounds, longest, scale)
        shape = kv_heads, rows, self.variant.lines
        outputs: list[Output] = [((*shape, size), self.layout.dtype), ((*shape, 1), mx.float32)]
        body = merge_body(prefixes=False, sinks=False, alone=True)
        run = self.runs.get("alone") or self._make("alone", (body, self._merge))
        out, score = run([splits, bounds], (size, heads, rows), (size, 1, 1), outputs)
        return score, out

    def _splits(
        self, queries: mx.array, records: mx.array, bounds: mx.array, longest: int, scale: float
    ) -> mx.array:
        """Attention to each split of all rows, for ``merge_body``."""
        rows, kv_heads = queries.shape[0], records.shape[1]
        num_splits = self._num_splits(longest)
        output = self._output_of_splits(rows, num_splits)
        inputs: list[Input] = [queries, _for_rows(records, rows), bounds]
        run = self.runs.get(("splits", scale))
        if run is None:
            what = splits_body(matrices=self.matrices), self._splitting(scale)
            run = self._make(("splits", scale), what)
        grid = kv_heads * self.threads, num_splits, rows
        (found,) = run(inputs, grid, (self.threads, 1, 1), [output])
        return found

    def _num_splits(self, longest: int) -> int:
        """Splits of the longest row, one at least."""
        return max(1, -(-longest // self.split))

    def _output_of_splits(self, rows: int, num_splits: int) -> Output:
        kv_heads = self.layout.scheme.shape.num_heads
        size = self.layout.values.size + 2  # and the highest score, and the sum of weights
        return (rows, kv_heads, num_splits, self.variant.lines, size), mx.float32

    def _splitting(self, scale: float) -> list[Constant]:
        """The scale is a constant: on CUDA, MLX has an array of one number in the host's memory.

        To read it there took an H200 16 to 24 µs a layer.
        """
        return [*self.variant.splits_of(matrices=self.matrices), ("SCALE", float_bits(scale))]

    def _joining(
        self, ends: Ends, prefixes: bool, sinks: bool, scale: float
    ) -> tuple[Body, list[Constant]]:
        """The last kernel of ``attend``."""
        flags = {"prefixes": prefixes, "sinks": sinks}
        if ends == "merge":
            return merge_body(**flags, alone=False), self._merge
        flags |= {"joined": ends == "one", "last": ends == "last"}
        return splits_body(matrices=self.matrices, **flags), self._splitting(scale)

    def _make(self, key: Hashable, what: tuple[Body, list[Constant]]) -> Run:
        body, constants = what
        self.runs[key] = self.launch(body, tuple(constants))
        return self.runs[key]

    def pack(self, keys: mx.array, values: Input) -> mx.array:
        """Records ``[rows, kv heads, 1, words]`` of one token a row.

        ``keys`` and ``values`` are ``[rows, kv heads, 1, size]``, in the basis of storage. Where
        values do not lie in one piece, they should be a view.
        """
        rows, kv_heads = keys.shape[:2]
        units = self.layout.keys.size // UNIT, self.layout.values.size // UNIT
        threads = sum(-(-count // _SIMD) * _SIMD for count in units)
        outputs = [((rows, kv_heads, 1, self.layout.words), mx.uint32)]
        run = self.runs.get("pack") or self._make("pack", (PACK, self.variant.pack))
        (records,) = run([keys, values], (kv_heads * threads, rows, 1), (threads, 1, 1), outputs)
        return records

    def place_rows(
        self, places: mx.array, keys: Parts, values: Parts, count: int, columns: int
    ) -> mx.array:
        """Records of whole slots that rows come into; see ``RecordKernels.place_rows``."""
        threads = -(-self.layout.words // _SIMD) * _SIMD
        kv_heads = keys[0].shape[1]
        run = self.runs.get("place_rows")
        if run is None:
            what = place_rows_body(len(keys), len(values)), self.variant.record
            run = self._make("place_rows", what)
        grid = columns * threads, kv_heads, count
        shape = count, kv_heads, columns, self.layout.words
        inputs = [places, *keys, *values]
        (records,) = run(inputs, grid, (threads, 1, 1), [(shape, mx.uint32)])
        return records


def _ends(num_splits: int, counters: mx.array | None, num_counted: int) -> Ends:
    if num_splits == 1:
        return "one"
    return "last" if counters is not None and num_counted <= counters.size else "merge"


def _for_rows(records: mx.array, rows: int) -> Input:
    """Records ``[1, ...]`` as those of each of so many rows; others as they are."""
    one, *sizes = records.shape
    if one == rows or one > 1:
        return records
    _, columns, words = sizes
    strides = 0, columns * words, words, 1
    return View(mx.broadcast_to(records, (rows, *sizes)), records, 0, strides)
