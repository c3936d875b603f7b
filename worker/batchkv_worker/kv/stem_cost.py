"""What a stem must save to be worth its kernels: measured once at start, on the device that serves.

A prefix that is held once is read once for all of its rows, but attention over it and over what
each row has of its own takes more kernels than attention over one line. Both are timed for a short
and for a long prefix; between them lies the number of cells that must be saved.
"""

from __future__ import annotations

import logging

import mlx.core as mx

from batchkv_worker.kv import stem
from batchkv_worker.kv.attention import Path, attend, in_slots
from batchkv_worker.kv.schemes import LayerScheme, Parts
from batchkv_worker.kv.timing import least_time

log = logging.getLogger("batchkv.engine")

UNMEASURED = 768  # cells: a block of 256 tokens that four rows share
# A busy machine may say anything; and a stem saves memory, which no clock shows.
LEAST, MOST = 256, 16_384
SHORT, LONG = 64, 1024  # tokens of the prefixes that are timed
OWN = 64  # tokens that each row has beside them


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
        scale = 0.125  # not 1: what models do
        apart = least_time(lambda: attend(*how, *lines, scale, whole))
        together = least_time(lambda: stem.attend(*how, [shared], own, scale, rest))
        return None if apart is None or together is None else apart - together

    def _line(self, rows: int, tokens: int) -> tuple[Parts, Parts]:
        shape = self._scheme.shape
        keys, values = (
            mx.random.normal((rows, shape.num_heads, tokens, size)).astype(self._dtype)
            for size in (shape.key_size, shape.value_size)
        )
        return self._scheme.keys.pack(keys), self._scheme.values.pack(values)
