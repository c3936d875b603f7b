"""Which attention path decode takes: measured once at start, for each scheme that a model has.

A path that the device refuses is left out. The same measurement gives what launching the kernels of
one more group of rows costs, in cells: one row's keys and values of one column.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import mlx.core as mx

from batchkv_worker.kv.attention.paths import LayerAttention, Path, attend, in_slots, paths_of
from batchkv_worker.kv.backends.contract import Backend
from batchkv_worker.kv.backends.timing import least_times
from batchkv_worker.kv.schemes.packing import LayerScheme

log = logging.getLogger("batchkv.engine")

# Tokens at which a path is timed, and has to run. Slots grow by 64 columns, and CUDA multiplies by
# packed keys only where they are a multiple of 128.
_SHORT, _LONG = 64, 576
_SPARE = 64  # columns of a buffer that are not read: some paths copy what is not in one piece
_CHAIN = 4  # times in a row, so that the host's wait for the end does not count as a group's cost
_REPEATS = 15
_MIN_GROUP_COST, _MAX_GROUP_COST = 256, 1 << 20  # whatever a busy machine makes of it


@dataclass(frozen=True, slots=True)
class Choice:
    """The path to take; the times of all, in milliseconds; and what a group of rows costs."""

    path: Path
    milliseconds: dict[Path, float]
    group_cost: int


def choose(
    backend: Backend,
    scheme: LayerScheme,
    num_query_heads: int,
    dtype: mx.Dtype,
    *,
    num_rows: int,
) -> Choice:
    """Time every path for ``num_rows`` rows of such a layer."""
    paths = paths_of(scheme, spreads=backend.spreads_codes)
    samples: dict[tuple[LayerScheme, int], _Sample] = {}
    ways = []
    for tokens, path in product((_SHORT, _LONG), paths):
        kept = in_slots(scheme, path), tokens  # which some paths have in common
        if kept not in samples:
            layer = LayerAttention(backend, kept[0], dtype)
            samples[kept] = _Sample(layer, num_query_heads, num_rows, tokens)
        ways.append(partial(samples[kept].run, path))
    spent = least_times(ways, _REPEATS)
    samples.clear()
    ways.clear()
    mx.clear_cache()  # no memory limit counts them
    shorts: dict[Path, float] = {}
    times: dict[Path, float] = {}
    for path, short, long in zip(paths, spent[: len(paths)], spent[len(paths) :], strict=True):
        if short is not None and long is not None:
            shorts[path], times[path] = short / _CHAIN, long / _CHAIN
    if not times:
        raise RuntimeError(f"no attention path of this backend takes {scheme.keys}")
    path = min(times, key=lambda name: times[name])
    cost = _group_cost(times[path], shorts[path], num_rows)
    log.info(
        "decode attention: %s for %s keys, %s values (%s); a group of rows costs %d cells",
        *(path, scheme.keys, scheme.values),
        *(", ".join(f"{name} {spent:.2f} ms" for name, spent in times.items()), cost),
    )
    return Choice(path, times, cost)


def _group_cost(long: float, short: float, num_rows: int) -> int:
    """Cells whose reading takes as long as starting a group's kernels."""
    if long <= short:
        return _MAX_GROUP_COST  # the device does not notice what it reads
    per_cell = (long - short) / (num_rows * (_LONG - _SHORT))
    start = max(0.0, short - per_cell * num_rows * _SHORT)
    return max(_MIN_GROUP_COST, min(_MAX_GROUP_COST, int(start / per_cell)))


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
        self._keys, self._values = (
            tuple(part[..., _SPARE:, :] for part in parts)
            for parts in (scheme.keys.pack(keys), scheme.values.pack(values))
        )
        mx.eval(self._queries, self._mask, self._keys, self._values)

    def run(self, path: Path) -> mx.array:
        """Several times, one after the other: as layers do, without waiting for the host."""
        queries, layer = self._queries, replace(self._layer, path=path)
        for _ in range(_CHAIN):
            # A scale that is not 1, as models have.
            out = attend(layer, queries, self._keys, self._values, 0.125, self._mask)
            (queries,) = mx.depends([self._queries], [out])
        return out
