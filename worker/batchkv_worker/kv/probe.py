"""Which attention path decode takes: measured once at start, for each scheme that a model has.

A path that a backend refuses is left out. The same measurement tells what starting the kernels of
one more group of rows costs, in cells of keys and values.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import mlx.core as mx

from batchkv_worker.kv.attention import Path, attend
from batchkv_worker.kv.schemes import LayerScheme

log = logging.getLogger("batchkv.engine")

PATHS: tuple[Path, ...] = get_args(Path)
_SHORT, _LONG = 64, 512  # tokens at which a path is timed
_MIN_GROUP_COST, _MAX_GROUP_COST = 256, 1 << 20  # whatever a busy machine makes of it


@dataclass(frozen=True, slots=True)
class Choice:
    """The path to take; the times of all, in milliseconds; and what a group of rows costs."""

    path: Path
    milliseconds: dict[Path, float]
    group_cost: int


def choose(scheme: LayerScheme, num_query_heads: int, dtype: mx.Dtype, *, num_rows: int) -> Choice:
    """Time every path for ``num_rows`` rows of such a layer."""
    run_long = _Sample(scheme, num_query_heads, dtype, num_rows, _LONG).run
    timed = {path: _time(lambda path=path: run_long(path)) for path in PATHS}  # type: ignore[misc]
    times = {path: spent for path, spent in timed.items() if spent is not None}
    if not times:
        raise RuntimeError(f"no attention path of this backend takes {scheme.keys}")
    path = min(times, key=lambda name: times[name])
    run_short = _Sample(scheme, num_query_heads, dtype, num_rows, _SHORT).run
    short = _time(lambda: run_short(path))
    cost = _group_cost(times[path], short, num_rows)
    log.info(
        "decode attention: %s for %s keys, %s values (%s); a group of rows costs %d cells",
        *(path, scheme.keys, scheme.values),
        *(", ".join(f"{name} {spent:.2f} ms" for name, spent in times.items()), cost),
    )
    return Choice(path, times, cost)


def _group_cost(long: float, short: float | None, num_rows: int) -> int:
    """Cells whose reading takes as long as starting a group's kernels."""
    if short is None or long <= short:
        return _MAX_GROUP_COST  # the device does not notice what it reads
    per_cell = (long - short) / (num_rows * (_LONG - _SHORT))
    start = max(0.0, short - per_cell * num_rows * _SHORT)
    return max(_MIN_GROUP_COST, min(_MAX_GROUP_COST, int(start / per_cell)))


class _Sample:
    """Random rows of a layer, packed."""

    def __init__(
        self, scheme: LayerScheme, num_query_heads: int, dtype: mx.Dtype, rows: int, tokens: int
    ) -> None:
        shape = scheme.shape
        keys, values = (
            mx.random.normal((rows, shape.num_heads, tokens, size)).astype(dtype)
            for size in (shape.key_size, shape.value_size)
        )
        self._queries = mx.random.normal((rows, num_query_heads, 1, shape.key_size)).astype(dtype)
        self._mask = mx.arange(tokens) >= mx.arange(rows).reshape(-1, 1, 1, 1)
        self._keys, self._values = scheme.keys.pack(keys), scheme.values.pack(values)
        self._scheme, self._dtype = scheme, dtype
        mx.eval(self._queries, self._mask, self._keys, self._values)

    def run(self, path: Path) -> mx.array:
        return attend(
            path,
            self._scheme,
            self._dtype,
            self._queries,
            self._keys,
            self._values,
            1.0,
            self._mask,
        )


def _time(run: Callable[[], mx.array], repeats: int = 7) -> float | None:
    """Least milliseconds; None for a path that the backend refuses.

    The least, since what else the machine does can only add, and does so by turns.
    """
    try:
        mx.eval(run())
        spent: list[float] = []
        for _ in range(repeats):
            begin = time.perf_counter()
            mx.eval(run())
            spent.append(time.perf_counter() - begin)
    except (ValueError, RuntimeError):  # what MLX raises for a kernel that a backend lacks
        return None
    return min(spent) * 1e3
