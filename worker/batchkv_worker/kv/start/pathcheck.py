"""Compares each way to attend with a float32 product, before its time counts.

A kernel that leaves out columns would be the fastest of all. So every path, shared prefixes and
their kernel are computed on a few rows at ``LENGTHS`` columns, with a mask and without. The results
are compared with plain products on the CPU, over the same keys and values unpacked in float32
(``check_tokens``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx

from batchkv_worker.faults import is_device_fault
from batchkv_worker.kv.attention import records, shared_prefix
from batchkv_worker.kv.attention.paths import LayerAttention, attend, in_slots
from batchkv_worker.kv.backends.compare import difference, path_tolerance
from batchkv_worker.kv.backends.contract import Backend
from batchkv_worker.kv.backends.measurements import Codec
from batchkv_worker.kv.schemes.packing import LayerScheme
from batchkv_worker.kv.start.check_layers import (
    MAX_ROWS,
    few_heads,
    layer_of,
    paths_on,
    with_few_heads,
)
from batchkv_worker.kv.start.check_tokens import (
    Tokens,
    exact_attention,
    normal,
    on_cpu,
    sliced,
)
from batchkv_worker.kv.start.machine import is_rounded
from batchkv_worker.kv.types import PackedKV

# MLX has other kernels from 1,024, 4,096 and 8,192 columns on, and for what 64 does not divide.
LENGTHS = (64, 576, 1_100, 4_200, 8_300)
STORED, PREFILL = "stored values", "prefill"
PREFIX = "shared prefix"

_ROWS, _FREE = MAX_ROWS, 2  # the last of them is a free slot
_CHUNK = 40  # tokens of a prompt: more than kernels for decode take, and no multiple of a tile
_OWN = 64  # tokens of each row after a shared prefix
_LOST = 0.8  # of random numbers; two bits keep about half of them


@dataclass(frozen=True, slots=True)
class PathCheck:
    """One comparison. ``error`` and ``tolerance`` are shares of the largest number.

    ``name`` is a path's, or one of ``STORED``, ``PREFILL``, ``PREFIX``. ``fault`` says
    what the device refused.
    """

    name: str
    columns: int
    is_masked: bool
    error: float
    tolerance: float
    fault: str = ""

    @property
    def is_ok(self) -> bool:
        """Whether rounding explains the difference."""
        return not self.fault and self.error <= self.tolerance

    def as_json(self) -> list[Any]:
        """All fields; an error that is no number is None."""
        error = self.error if math.isfinite(self.error) else None
        return [self.name, self.columns, self.is_masked, error, self.tolerance, self.fault]

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Undo ``as_json``; ValueError or TypeError for anything else."""
        name, columns, is_masked, error, tolerance, fault = value
        error = float("inf") if error is None else float(error)
        return cls(str(name), int(columns), bool(is_masked), error, float(tolerance), str(fault))

    def __str__(self) -> str:
        where = f"at {self.columns:,} columns{' with a mask' if self.is_masked else ''}"
        if self.fault:
            return f"{self.name} is refused {where}: {self.fault}"
        if not math.isfinite(self.error):
            return f"{self.name} gives what is no number {where}"
        share, most = f"{self.error:.2g}", f"{self.tolerance:g}"
        return f"{self.name} differs by {share} of the largest number {where} (at most {most})"


def check_paths(
    backend: Backend,
    scheme: LayerScheme,
    num_query_heads: int,
    dtype: mx.Dtype,
    lengths: Sequence[int] | None = None,
    *,
    with_kernel: bool = True,
) -> tuple[PathCheck, ...]:
    """Every path of such a layer at every length, and how its keys and values are stored.

    ``lengths`` None are ``LENGTHS``. The kernel's path is left out without ``with_kernel``.
    """
    lines = num_query_heads // scheme.shape.num_heads
    found = [_check_stored(scheme, dtype)]
    for columns in lengths or LENGTHS:
        samples: dict[LayerScheme, _Sample] = {}
        for path in paths_on(backend, scheme, lines, dtype, with_kernel=with_kernel):
            kept = few_heads(in_slots(scheme, path), columns)
            layer = layer_of(backend, kept, lines, dtype, path)
            if kept not in samples:
                samples[kept] = _Sample(layer, lines, columns)
            for is_whole in _modes(layer):
                found += samples[kept].check(layer, is_whole)
    mx.clear_cache()  # no memory limit counts them
    return tuple(found)


def check_prefill(
    backend: Backend,
    scheme: LayerScheme,
    num_query_heads: int,
    dtype: mx.Dtype,
    lengths: Sequence[int] | None = None,
) -> tuple[PathCheck, ...]:
    """The last tokens of a prompt of each length, as a chunk attends to all tokens so far."""
    lines = num_query_heads // scheme.shape.num_heads
    found: list[PathCheck] = []
    for columns in lengths or LENGTHS:
        layer = LayerAttention(backend, few_heads(scheme, columns), dtype)
        for is_whole in _modes(layer):
            found.append(_check_chunk(layer, lines, columns, is_whole))
    mx.clear_cache()
    return tuple(found)


def _check_chunk(layer: LayerAttention, lines: int, columns: int, is_whole: bool) -> PathCheck:
    shape = layer.scheme.shape
    scale = shape.key_size**-0.5
    tokens = Tokens(layer, columns, firsts=[0])
    queries = normal((1, shape.num_heads * lines, _CHUNK, shape.key_size)).astype(layer.dtype)
    seen = mx.arange(columns) <= mx.arange(columns - _CHUNK, columns)[None, None, :, None]
    what = tokens.buffers, tokens.columns, scale, "causal"
    wanted = exact_attention(queries, *tokens.exact, scale, seen)

    def run() -> mx.array:
        return over_columns(layer, queries, *what, is_whole=is_whole)

    return _compared(PREFILL, columns, True, layer.dtype, wanted, run)


def check_prefix(
    layer: LayerAttention, num_query_heads: int, lengths: Sequence[int] | None = None
) -> tuple[PathCheck, ...]:
    """Rows after a shared prefix of each length, with the kernel that ``layer`` has, if any.

    ``layer`` is as slots have it.
    """
    lines = num_query_heads // layer.scheme.shape.num_heads
    found: list[PathCheck] = []
    for columns in lengths or LENGTHS:
        few = with_few_heads(layer, lines, columns)
        sample = _PrefixSample(few, lines, columns)
        for is_whole in _modes(few):
            found += sample.check(is_whole)
    mx.clear_cache()
    return tuple(found)


CHECKS: Codec[tuple[PathCheck, ...]] = Codec(
    lambda checks: [check.as_json() for check in checks],
    lambda value: tuple(map(PathCheck.from_json, value)),
)


def is_right(checks: Sequence[PathCheck], name: str) -> bool:
    """Whether something passed all of its checks."""
    return all(check.is_ok for check in checks if check.name == name)


def worst(checks: Sequence[PathCheck], name: str) -> PathCheck:
    """The check of that name which failed, if any, else the one with the largest error."""
    own = [check for check in checks if check.name == name]
    return max(own, key=lambda check: (not check.is_ok, bool(check.fault), check.error))


def over_columns(
    layer: LayerAttention,
    queries: mx.array,
    buffers: PackedKV,
    columns: slice,
    scale: float,
    mask: mx.array | str | None,
    *,
    is_whole: bool,
) -> mx.array:
    """Attention as slots and prefill compute it, over some columns of the rows of ``queries``.

    ``is_whole``: the buffers are dequantized as they are, and the dense result is sliced.
    """
    if is_whole:
        buffers = layer.dequantize(buffers)
        layer = layer.dequantized
    keys, values = sliced(buffers, queries.shape[0], columns)
    return attend(layer, queries, keys, values, scale, mask)


def _modes(layer: LayerAttention) -> list[bool]:
    """Whether slots dequantize whole buffers, or slices: on some devices they do either."""
    return [False, True] if layer.reads_whole(1, 1) else [False]


def _check_stored(scheme: LayerScheme, dtype: mx.Dtype) -> PathCheck:
    """Whether the packed numbers are the given ones, within the scheme's precision."""
    lost = 0.0
    sides = (scheme.keys, scheme.shape.key_size), (scheme.values, scheme.shape.value_size)
    try:
        for tensor, size in sides:
            given = normal((1, 1, _OWN, size)).astype(dtype)
            parts = tensor.pack(given)
            mx.eval(given, parts)
            with on_cpu():
                rest = tensor.unpack(parts, mx.float32) - given.astype(mx.float32)
                share = mx.sqrt(mx.square(rest).mean() / mx.square(given).mean()).item()
            lost = max(lost, float(share) if share == share else float("inf"))
    except (ValueError, RuntimeError) as fault:
        if is_device_fault(fault):
            raise
        return PathCheck(STORED, _OWN, False, lost, _LOST, _first_line(fault))
    return PathCheck(STORED, _OWN, False, lost, _LOST)


class _Sample:
    """Rows of one length: the first sees all columns, the second two thirds, the third is free."""

    def __init__(self, layer: LayerAttention, lines: int, columns: int) -> None:
        self._layer, self._columns = layer, columns
        shape = layer.scheme.shape
        self._scale = shape.key_size**-0.5
        heads = shape.num_heads * lines
        self._queries = normal((_ROWS, heads, 1, shape.key_size)).astype(layer.dtype)
        firsts = [0, columns // 3, columns - 1]
        self._tokens = Tokens(layer, columns, firsts=firsts, has_free=True)
        self._mask = mx.arange(columns) >= mx.array(firsts).reshape(-1, 1, 1, 1)
        mx.eval(self._queries, self._mask)
        self._wanted = exact_attention(
            self._queries[:_FREE], *self._tokens.exact, self._scale, self._mask[:_FREE]
        )

    def check(self, layer: LayerAttention, is_whole: bool) -> list[PathCheck]:
        """All rows with a mask, and the first alone without, by the path of ``layer``."""
        tokens, queries, path = self._tokens, self._queries, layer.path
        what = tokens.buffers, tokens.columns, self._scale

        def masked() -> mx.array:
            if layer.records is not None:
                return self._by_kernel(layer, _ROWS)[:_FREE]
            return over_columns(layer, queries, *what, self._mask, is_whole=is_whole)[:_FREE]

        def plain() -> mx.array:
            if layer.records is not None:
                return self._by_kernel(layer, 1)
            return over_columns(layer, queries[:1], *what, None, is_whole=is_whole)

        return [
            _compared(path, self._columns, True, layer.dtype, self._wanted, masked),
            _compared(path, self._columns, False, layer.dtype, self._wanted[:1], plain),
        ]

    def _by_kernel(self, layer: LayerAttention, rows: int) -> mx.array:
        tokens = self._tokens
        what = tokens.records(layer), tokens.bounds, self._columns, self._scale
        return records.attend(layer, self._queries[:rows], *what)


class _PrefixSample:
    """The same rows with a few tokens of their own after a shared prefix of many."""

    def __init__(self, layer: LayerAttention, lines: int, columns: int) -> None:
        self._layer, self._columns = layer, columns
        shape = layer.scheme.shape
        self._scale = shape.key_size**-0.5
        heads = shape.num_heads * lines
        self._queries = normal((_ROWS, heads, 1, shape.key_size)).astype(layer.dtype)
        gain = max(1.0, columns / _OWN)  # few tokens are to weigh as much as many
        firsts = [0, _OWN // 3, _OWN - 1]
        self._long = Tokens(layer, columns, firsts=[0])
        self._short = Tokens(layer, _OWN, firsts=[0], gain=gain)
        self._own = Tokens(layer, _OWN, firsts=firsts, has_free=True, gain=gain)
        self._mask = mx.arange(_OWN) >= mx.array(firsts).reshape(-1, 1, 1, 1)
        mx.eval(self._queries, self._mask)

    def check(self, is_whole: bool) -> list[PathCheck]:
        """A prefix and own tokens with a mask; then a chain of two without.

        In the chain, the long prefix is attended for the rows of several groups. Where slots keep
        records, the first prefix is in a pool, and the chain is of products.
        """
        layer, scale, queries = self._layer, self._scale, self._queries
        long, short, own = self._long.parts(1), self._short.parts(1), self._own
        if layer.records is not None:
            return self._checks(
                lambda: self._by_kernel([long], _ROWS, in_pool=True)[:_FREE],
                lambda: self._by_kernel([long, short], 1, in_pool=False),
            )
        dense = layer.dequantized if is_whole else layer

        def given(prefix: PackedKV) -> PackedKV:
            return layer.dequantize(prefix) if is_whole else prefix

        def own_of(rows: int) -> PackedKV:
            return sliced(given(own.buffers), rows, own.columns)

        def masked() -> mx.array:
            rest = scale, self._mask
            return shared_prefix.attend(dense, queries, [given(long)], own_of(_ROWS), *rest)[:_FREE]

        def chain() -> mx.array:
            partial = shared_prefix.attend_partial(layer, queries, long, scale).of(slice(0, 1))
            rest = (scale, None, None, [partial])
            return shared_prefix.attend(dense, queries[:1], [given(short)], own_of(1), *rest)

        return self._checks(masked, chain)

    def _by_kernel(self, prefixes: list[PackedKV], rows: int, *, in_pool: bool) -> mx.array:
        """The kernel over own tokens, joined with the prefixes."""
        layer, queries = self._layer, self._queries[:rows]
        attend_all = records.pooled_for_all if in_pool else records.partials_for_all
        partials = attend_all(layer, queries, prefixes, self._scale)
        own = self._own.records(layer), self._own.bounds, _OWN, self._scale
        return records.attend(layer, queries, *own, partials=partials)

    def _checks(
        self, masked: Callable[[], mx.array], chain: Callable[[], mx.array]
    ) -> list[PathCheck]:
        layer = self._layer
        behind = self._wanted([self._long], rows=_FREE, is_masked=True)
        chained = self._wanted([self._long, self._short], rows=1, is_masked=False)
        return [
            _compared(PREFIX, self._columns, True, layer.dtype, behind, masked),
            _compared(PREFIX, self._columns, False, layer.dtype, chained, chain),
        ]

    def _wanted(self, prefixes: list[Tokens], *, rows: int, is_masked: bool) -> mx.array:
        with on_cpu():
            keys, values = (
                mx.concatenate(
                    [
                        *(mx.repeat(one.exact[side], rows, axis=0) for one in prefixes),
                        self._own.exact[side][:rows],
                    ],
                    axis=2,
                )
                for side in (0, 1)
            )
            count = keys.shape[2]
            before = mx.ones((rows, 1, 1, count - _OWN), mx.bool_)
            own = self._mask[:rows] if is_masked else mx.ones((rows, 1, 1, _OWN), mx.bool_)
            seen = mx.concatenate([before, own], axis=-1)
        return exact_attention(self._queries[:rows], keys, values, self._scale, seen)


def _compared(
    name: str,
    columns: int,
    is_masked: bool,
    dtype: mx.Dtype,
    wanted: mx.array,
    run: Callable[[], mx.array],
) -> PathCheck:
    tolerance = path_tolerance(dtype, is_rounded=is_rounded())
    try:
        found = run()
        mx.eval(found)
    except (ValueError, RuntimeError) as fault:  # what MLX raises for a kernel that it lacks
        if is_device_fault(fault):
            raise
        text = _first_line(fault)
        return PathCheck(name, columns, is_masked, float("inf"), tolerance, text)
    with on_cpu():
        return PathCheck(name, columns, is_masked, difference(wanted, found), tolerance)


def _first_line(fault: BaseException) -> str:
    return next(iter(str(fault).strip().splitlines()), type(fault).__name__)[:200]
