"""Measures how many cells a shared prefix must save to be worth its kernels, on this device.

A prefix that is stored once is read once for all of its rows. But attention over a prefix and over
each row's own tokens launches more kernels than attention over all tokens of a row at once. Both
are timed for a short and for a long prefix. The times give the number of cells that must be saved.
"""

from __future__ import annotations

import mlx.core as mx

from batchkv_worker.kv.attention import shared_prefix
from batchkv_worker.kv.attention.paths import LayerAttention, attend
from batchkv_worker.kv.backends.timing import Way, least_times
from batchkv_worker.kv.types import PackedKV

UNMEASURED = 768  # cells: a block of 256 tokens that four rows share
# A busy machine may give any number; and a prefix saves memory, which no clock shows.
LEAST, MOST = 256, 16_384
SHORT, LONG = 64, 1024  # tokens of the prefixes that are timed
OWN = 64  # tokens that each row has after them
SCALE = 0.125  # of the scores, as in most models


def measure(layer: LayerAttention, num_query_heads: int, *, num_rows: int) -> int:
    """Cells (one row's keys and values of one column) that a prefix must save.

    From ``LEAST`` to ``MOST``. ``UNMEASURED`` where the device refuses to compute the samples.
    """
    rows = max(2, num_rows)
    sample = _Sample(layer, num_query_heads, rows)
    spent = least_times([*sample.ways(SHORT), *sample.ways(LONG)])
    mx.clear_cache()
    if None in spent:
        return UNMEASURED
    short, short_shared, long, long_shared = (one or 0.0 for one in spent)
    gains = short - short_shared, long - long_shared
    return crossover((rows - 1) * SHORT, gains[0], (rows - 1) * LONG, gains[1])


def crossover(few: int, gain_of_few: float, many: int, gain_of_many: float) -> int:
    """The number of saved cells at which the gain is 0, if it is linear; gains in milliseconds."""
    per_cell = (gain_of_many - gain_of_few) / (many - few)
    if per_cell <= 0:
        return MOST  # the device does not notice what it reads
    return max(LEAST, min(MOST, int(few - gain_of_few / per_cell)))


class _Sample:
    """Random rows of a layer, as slots keep them for a path."""

    def __init__(self, layer: LayerAttention, num_query_heads: int, rows: int) -> None:
        self._layer, self._rows = layer, rows
        shape = (rows, num_query_heads, 1, layer.scheme.shape.key_size)
        self._queries = mx.random.normal(shape).astype(layer.dtype)
        # As in slots, where rows begin at columns of their own.
        self._first = mx.arange(rows).reshape(-1, 1, 1, 1)

    def ways(self, tokens: int) -> tuple[Way, Way]:
        """Attention over so many tokens and each row's own: stored in each row, and as a prefix."""
        lines = self._line(self._rows, tokens + OWN)
        shared, own = self._line(1, tokens), self._line(self._rows, OWN)
        whole, rest = (mx.arange(count) >= self._first for count in (tokens + OWN, OWN))
        mx.eval(self._queries, lines, shared, own, whole, rest)
        layer, queries = self._layer, self._queries
        return (
            lambda: attend(layer, queries, *lines, SCALE, whole),
            lambda: shared_prefix.attend(layer, queries, [shared], own, SCALE, rest),
        )

    def _line(self, rows: int, tokens: int) -> PackedKV:
        scheme = self._layer.scheme
        keys, values = (
            mx.random.normal((rows, scheme.shape.num_heads, tokens, size)).astype(self._layer.dtype)
            for size in (scheme.shape.key_size, scheme.shape.value_size)
        )
        return scheme.keys.pack(keys), scheme.values.pack(values)
