"""Chooses the attention path of decode: checked and measured once, for each scheme of a model.

A path that the device refuses, or that differs from a float32 product, is left out. The same
measurement gives what launching the kernels of one more group of rows costs, in cells: one row's
keys and values of one column.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, get_args

import mlx.core as mx

from batchkv_worker.kv.attention import records
from batchkv_worker.kv.attention.paths import LayerAttention, Path, in_slots
from batchkv_worker.kv.attention.records import bounds_of
from batchkv_worker.kv.backends.contract import Backend
from batchkv_worker.kv.backends.measurements import Codec
from batchkv_worker.kv.backends.timing import least_times
from batchkv_worker.kv.schemes.packing import LayerScheme
from batchkv_worker.kv.start import pathcheck
from batchkv_worker.kv.start.check_layers import layer_of, paths_on
from batchkv_worker.kv.start.pathcheck import PathCheck, check_paths, over_columns

log = logging.getLogger("batchkv.engine")

# Tokens at which a path is timed, and has to run. Slots grow by 64 columns, and CUDA multiplies by
# packed keys only where they are a multiple of 128.
SHORT, LONG = 64, 576
_SPARE = 64  # columns of a buffer that are not read: some paths copy what is not in one piece
_CHAIN = 4  # times in a row, as layers do
_REPEATS = 15
_MIN_GROUP_COST, _MAX_GROUP_COST = 256, 1 << 20  # whatever a busy machine makes of it
_LEAST_TIME = 1e-6  # milliseconds: what a clock makes of less than the wait for an empty chain

Milliseconds = dict[Path, float]


@dataclass(frozen=True, slots=True)
class Choice:
    """The path to take, and what a group of rows costs.

    ``short`` and ``long`` have the milliseconds of every right path over ``SHORT`` and ``LONG``
    tokens a row.
    """

    path: Path
    short: Milliseconds
    long: Milliseconds
    group_cost: int
    checks: tuple[PathCheck, ...]

    @property
    def has_fused(self) -> bool:
        """Whether the fused path is right for what slots keep for the chosen one."""
        return self.path.replace("folded", "fused").replace("packed", "fused") in self.long


def choose(
    backend: Backend,
    scheme: LayerScheme,
    num_query_heads: int,
    dtype: mx.Dtype,
    *,
    num_rows: int,
    with_kernel: bool = True,
) -> Choice:
    """Check every path, and time those that are right, for ``num_rows`` rows of such a layer.

    The kernel's path is left out without ``with_kernel``.

    Raises RuntimeError where none is left.
    """
    checks = check_paths(backend, scheme, num_query_heads, dtype, with_kernel=with_kernel)
    lines = num_query_heads // scheme.shape.num_heads
    paths = _right_paths(paths_on(backend, scheme, lines, dtype, with_kernel=with_kernel), checks)
    samples: dict[tuple[LayerScheme, int, bool], _Sample] = {}
    ways: list[Any] = []
    for tokens, path in product((SHORT, LONG), paths):
        # Some paths have a sample in common.
        kept = in_slots(scheme, path), tokens, path == "kernel"
        if kept not in samples:
            layer = layer_of(backend, kept[0], lines, dtype, path)
            samples[kept] = _Sample(layer, num_query_heads, num_rows, tokens)
        ways.append(partial(samples[kept].run, path))
    *spent, wait = least_times([*ways, _nothing], _REPEATS)
    samples.clear()
    ways.clear()
    mx.clear_cache()  # no memory limit counts them
    short: Milliseconds = {}
    long: Milliseconds = {}
    for path, few, many in zip(paths, spent[: len(paths)], spent[len(paths) :], strict=True):
        if few is not None and many is not None:
            short[path], long[path] = _of_layer(few, wait), _of_layer(many, wait)
    if not long:
        raise RuntimeError(f"no attention path of this backend takes {scheme.keys}")
    path = min(long, key=lambda name: long[name])
    return Choice(path, short, long, _group_cost(long[path], short[path], num_rows), checks)


def _right_paths(paths: Sequence[Path], checks: Sequence[PathCheck]) -> list[Path]:
    """The paths that agree with float32; the log names the others."""
    stored = pathcheck.worst(checks, pathcheck.STORED)
    if not stored.is_ok:
        raise RuntimeError(str(stored))
    right = [path for path in paths if pathcheck.is_right(checks, path)]
    faults = [pathcheck.worst(checks, path) for path in paths if path not in right]
    for fault in faults:
        # A refusal does no harm. That of our own kernel is a fault of ours.
        is_usual = fault.fault and fault.name != "kernel"
        level = logging.DEBUG if is_usual else logging.WARNING
        log.log(level, "an attention path is not used on this device: %s", fault)
    if not right:
        raise RuntimeError("; ".join(map(str, faults)))
    return right


def _of_layer(spent: float, wait: float | None) -> float:
    """Milliseconds of one layer.

    The host waits once for a whole chain, which takes a GPU 0.1 ms or more. In a step it waits once
    for all layers. So what a chain of nothing takes is no layer's cost, nor that of starting a
    group of rows.
    """
    return max(_LEAST_TIME, spent - (wait or 0.0)) / _CHAIN


def _nothing() -> mx.array:
    """A chain without layers: one number is computed, and waited for."""
    return mx.zeros(1) + 1


def _group_cost(long: float, short: float, num_rows: int) -> int:
    """Cells whose reading takes as long as starting a group's kernels."""
    if long <= short:
        return _MAX_GROUP_COST  # the device does not notice what it reads
    per_cell = (long - short) / (num_rows * (LONG - SHORT))
    start = max(0.0, short - per_cell * num_rows * SHORT)
    return max(_MIN_GROUP_COST, min(_MAX_GROUP_COST, int(start / per_cell)))


def _choice_as_json(choice: Choice) -> Any:
    return {
        "path": choice.path,
        "milliseconds": {
            path: {str(SHORT): choice.short[path], str(LONG): choice.long[path]}
            for path in choice.long
        },
        "group_cost": choice.group_cost,
        "checks": [check.as_json() for check in choice.checks],
    }


def _choice_from_json(value: Any) -> Choice:
    times = value["milliseconds"]
    short, long = (
        {_path(name): float(both[str(length)]) for name, both in times.items()}
        for length in (SHORT, LONG)
    )
    checks = tuple(map(PathCheck.from_json, value["checks"]))
    path = _path(value["path"])
    if path not in long:
        raise ValueError(f"{path} was not timed")
    return Choice(path, short, long, int(value["group_cost"]), checks)


def _path(name: Any) -> Path:
    if name not in get_args(Path):
        raise ValueError(f"there is no path {name!r}")
    path: Path = name
    return path


CHOICE: Codec[Choice] = Codec(_choice_as_json, _choice_from_json)


class _Sample:
    """Random rows of a layer, as slots keep them: columns of a longer buffer."""

    def __init__(self, layer: LayerAttention, num_query_heads: int, rows: int, tokens: int) -> None:
        scheme, dtype = layer.scheme, layer.dtype
        shape = scheme.shape
        keys, values = (
            mx.random.normal((rows, shape.num_heads, tokens + _SPARE, size)).astype(dtype)
            for size in (shape.key_size, shape.value_size)
        )
        self._queries = mx.random.normal((rows, num_query_heads, 1, shape.key_size)).astype(dtype)
        self._mask = mx.arange(tokens) >= mx.arange(rows).reshape(-1, 1, 1, 1)
        self._layer = layer
        self._buffers = scheme.keys.pack(keys), scheme.values.pack(values)
        self._columns = slice(_SPARE, _SPARE + tokens)
        ends = [_SPARE + tokens] * rows
        self._bounds = bounds_of([_SPARE + min(row, tokens - 1) for row in range(rows)], ends)
        if layer.records is not None:
            self._records = layer.records.layout.join(*self._buffers)
            self._buffers = (), ()
            mx.eval(self._records, self._bounds)
        mx.eval(self._queries, self._mask, self._buffers)

    def run(self, path: Path) -> mx.array:
        """Several times, one after the other: as layers do, without waiting for the host."""
        if path == "kernel":
            return self._run_kernel()
        queries, layer = self._queries, replace(self._layer, path=path)
        # As where most of what is stored is read; and a scale that is not 1, as models have.
        is_whole = layer.reads_whole(LONG, LONG + _SPARE)
        what = self._buffers, self._columns, 0.125, self._mask
        for _ in range(_CHAIN):
            out = over_columns(layer, queries, *what, is_whole=is_whole)
            (queries,) = mx.depends([self._queries], [out])
        return out

    def _run_kernel(self) -> mx.array:
        queries, layer = self._queries, self._layer
        longest = self._columns.stop - self._columns.start
        for _ in range(_CHAIN):
            out = records.attend(layer, queries, self._records, self._bounds, longest, 0.125)
            (queries,) = mx.depends([self._queries], [out])
        return out
