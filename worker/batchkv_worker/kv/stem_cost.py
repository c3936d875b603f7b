"""What a stem must save to be worth its kernels: measured once at start, on the device that serves.

A prefix that is held once is read once for all of its rows, but attention over it and over what
each row has of its own takes more kernels than attention over one line. Both are timed for a short
and for a long prefix; between them lies the number of cells that must be saved.
"""

from __future__ import annotations

import logging
from typing import Any

import mlx.core as mx

from batchkv_worker.kv import stem, stem_kernel
from batchkv_worker.kv.attention import Path, attend, in_slots
from batchkv_worker.kv.schemes import LayerScheme, Parts
from batchkv_worker.kv.timing import least_time

log = logging.getLogger("batchkv.engine")

UNMEASURED = 768  # cells: a block of 256 tokens that four rows share
# A busy machine may say anything; and a stem saves memory, which no clock shows.
LEAST, MOST = 256, 16_384
SHORT, LONG = 64, 1024  # tokens of the prefixes that are timed
OWN = 64  # tokens that each row has beside them
SCALE = 0.125  # not 1: what models do

_MARGIN = 1.1  # by which the kernel has to be faster
_TIMES = 8  # of it that are timed together
_CLOSE = 0.02  # of the largest number: rounding in half precision stays below


def measure(
    scheme: LayerScheme, num_query_heads: int, dtype: mx.Dtype, path: Path, *, num_rows: int
) -> int:
    """Cells (one row's keys and values of one column) that a stem must save, ``LEAST`` to ``MOST``.

    ``UNMEASURED`` where the backend refuses what is to be timed.
    """
    rows = max(2, num_rows)
    sample = _Sample(scheme, num_query_heads, dtype, path, rows)
    gains = [sample.gain(tokens) for tokens in (SHORT, LONG)]
    short, long = gains
    if short is None or long is None:
        return UNMEASURED
    cost = crossover((rows - 1) * SHORT, short, (rows - 1) * LONG, long)
    log.info("a prefix is held once where that saves %d cells or more", cost)
    return cost


def choose_kernel(
    scheme: LayerScheme, num_query_heads: int, dtype: mx.Dtype, path: Path, *, num_rows: int
) -> bool:
    """Whether layers like that weigh with the kernel from now on: if it is right, and faster."""
    shape = scheme.shape
    lines = num_query_heads // shape.num_heads
    layer = stem_kernel.Layer(lines, shape.key_size, shape.value_size, dtype)
    is_used = False
    if stem_kernel.fits(layer) and not path.endswith("packed"):
        sample = _Sample(scheme, num_query_heads, dtype, path, max(2, num_rows))
        is_used = sample.gains_by_kernel(layer)
    stem_kernel.choose(layer, is_used=is_used)
    return is_used


def crossover(few: int, gain_of_few: float, many: int, gain_of_many: float) -> int:
    """At how many saved cells the gain is 0, when it grows in a line; gains in milliseconds."""
    per_cell = (gain_of_many - gain_of_few) / (many - few)
    if per_cell <= 0:
        return MOST  # the device does not notice what it reads
    return max(LEAST, min(MOST, int(few - gain_of_few / per_cell)))


class _Sample:
    """Random rows of a layer, as slots keep them for a path."""

    def __init__(
        self, scheme: LayerScheme, num_query_heads: int, dtype: mx.Dtype, path: Path, rows: int
    ) -> None:
        self._scheme = in_slots(scheme, path)
        self._dtype, self._path, self._rows = dtype, path, rows
        shape = (rows, num_query_heads, 1, scheme.shape.key_size)
        self._queries = mx.random.normal(shape).astype(dtype)
        # As in slots, where rows begin at columns of their own.
        self._first = mx.arange(rows).reshape(-1, 1, 1, 1)

    def gain(self, tokens: int) -> float | None:
        """Milliseconds that a stem of so many tokens saves; None if the backend refuses."""
        lines = self._line(self._rows, tokens + OWN)
        shared, own = self._line(1, tokens), self._line(self._rows, OWN)
        whole, rest = (mx.arange(count) >= self._first for count in (tokens + OWN, OWN))
        mx.eval(self._queries, lines, shared, own, whole, rest)
        how = (self._path, self._scheme, self._dtype, self._queries)
        apart = least_time(lambda: attend(*how, *lines, SCALE, whole))
        together = least_time(lambda: self._attend([shared], own, SCALE, rest))
        return None if apart is None or together is None else apart - together

    def gains_by_kernel(self, layer: stem_kernel.Layer) -> bool:
        """Whether the kernel gives what MLX's own do, and in less time."""
        shared, other, own = self._line(1, LONG), self._line(1, SHORT), self._line(self._rows, OWN)
        how = (self._scheme, self._dtype)
        # As a group has it: some of the rows that have a stem in common.
        twice = mx.concatenate([self._queries, self._queries])
        summary = stem.sum_up(*how, twice, other, SCALE).of(slice(1, self._rows + 1))
        sinks = mx.random.normal((self._queries.shape[1],)).astype(self._dtype)
        mask = mx.arange(OWN) >= self._first
        rest = ([shared], own, SCALE, mask, sinks, [summary])
        answers, times = [], []
        for is_used in (False, True):
            stem_kernel.choose(layer, is_used=is_used)
            spent = least_time(lambda: self._attend(*rest), times=_TIMES)
            if spent is None:
                return False
            times.append(spent)
            answers.append(self._attend(*rest).astype(mx.float32))
        plain, found = answers
        if not (mx.abs(plain - found).max() <= _CLOSE * mx.abs(plain).max()).item():
            log.warning("the kernel for stems answers otherwise than MLX's own: it is not used")
            return False
        return times[0] > times[1] * _MARGIN

    def _attend(self, *rest: Any) -> mx.array:
        return stem.attend(self._path, self._scheme, self._dtype, self._queries, *rest)

    def _line(self, rows: int, tokens: int) -> tuple[Parts, Parts]:
        shape = self._scheme.shape
        keys, values = (
            mx.random.normal((rows, shape.num_heads, tokens, size)).astype(self._dtype)
            for size in (shape.key_size, shape.value_size)
        )
        return self._scheme.keys.pack(keys), self._scheme.values.pack(values)
