"""What a stem must save to be worth its kernels: measured once at start, on the device that serves.

A prefix that is held once is read once for all of its rows, but attention over it and over what
each row has of its own takes more kernels than attention over one line. Both are timed for a short
and for a long prefix; between them lies the number of cells that must be saved.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import mlx.core as mx

from batchkv_worker.kv.attention import shared_prefix as stem
from batchkv_worker.kv.attention.paths import Path, attend, in_slots
from batchkv_worker.kv.backends.cpu import softmax
from batchkv_worker.kv.backends.cuda import prefix_kernel as stem_kernel
from batchkv_worker.kv.backends.gpu.joint_product import are_close
from batchkv_worker.kv.backends.timing import Way, gain, least_times
from batchkv_worker.kv.schemes.packing import LayerScheme
from batchkv_worker.kv.types import Parts

log = logging.getLogger("batchkv.engine")

UNMEASURED = 768  # cells: a block of 256 tokens that four rows share
# A busy machine may say anything; and a stem saves memory, which no clock shows.
LEAST, MOST = 256, 16_384
SHORT, LONG = 64, 1024  # tokens of the prefixes that are timed
OWN = 64  # tokens that each row has beside them
SCALE = 0.125  # not 1: what models do

FEW = 24  # tokens that show whether the kernel is right
# Of stems and summaries, with a mask, with sinks: those that a step may ask for, and all at once.
_KINDS = [(1, 0, False, False), (1, 0, True, False), (0, 1, True, False), (2, 1, True, True)]
_MARGIN = 1.05  # by which the kernel has to be faster: timed in turns, it varies by less
_TIMES = 8  # of it that are timed together


def measure(
    scheme: LayerScheme, num_query_heads: int, dtype: mx.Dtype, path: Path, *, num_rows: int
) -> int:
    """Cells (one row's keys and values of one column) that a stem must save, ``LEAST`` to ``MOST``.

    ``UNMEASURED`` where the backend refuses what is to be timed.
    """
    rows = max(2, num_rows)
    sample = _Sample(scheme, num_query_heads, dtype, path, rows)
    spent = least_times([*sample.ways(SHORT), *sample.ways(LONG)])
    mx.clear_cache()
    if None in spent:
        return UNMEASURED
    short, short_by_stem, long, long_by_stem = (one or 0.0 for one in spent)
    gains = short - short_by_stem, long - long_by_stem
    cost = crossover((rows - 1) * SHORT, gains[0], (rows - 1) * LONG, gains[1])
    log.info("a prefix is held once where that saves %d cells or more", cost)
    return cost


def choose_kernel(
    scheme: LayerScheme, num_query_heads: int, dtype: mx.Dtype, path: Path, *, num_rows: int
) -> bool:
    """Whether such layers weigh with the kernel from now on: if it is right, and faster."""
    if path.endswith("packed"):
        return False
    sample = _Sample(scheme, num_query_heads, dtype, path, max(2, num_rows))
    layer = sample.layer
    is_used = False
    try:
        is_used = (
            stem_kernel.fits(layer)
            and all(sample.is_faster_by_kernel(own) for own in (OWN, LONG))
            and all(sample.is_right_by_kernel(*kind) for kind in _KINDS)
        )
    except (ValueError, RuntimeError) as fault:  # what MLX raises for what it cannot compile
        log.warning("the kernel for stems is not used: %s", fault)
    finally:
        stem_kernel.choose(layer, is_used=is_used)
    if is_used:
        log.info("one kernel weighs what prefixes and rows hold, for %s", layer.scheme)
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

    def ways(self, tokens: int) -> tuple[Way, Way]:
        """Attention over so many tokens and their own in each row's line, and with a stem."""
        lines = self._line(self._rows, tokens + OWN)
        shared, own = self._line(1, tokens), self._line(self._rows, OWN)
        whole, rest = (
            softmax.as_in_steps(mx.arange(count) >= self._first, self._dtype)
            for count in (tokens + OWN, OWN)
        )
        mx.eval(self._queries, lines, shared, own, whole, rest)
        how = (self._path, self._scheme, self._dtype, self._queries)
        return (
            lambda: attend(*how, *lines, SCALE, whole),
            lambda: self._attend([shared], own, SCALE, rest),
        )

    @property
    def layer(self) -> stem_kernel.Layer:
        """What it is a sample of, for the kernel."""
        lines = self._queries.shape[1] // self._scheme.shape.num_heads
        return stem_kernel.Layer(self._scheme, lines, self._dtype)

    def is_faster_by_kernel(self, own: int) -> bool:
        """Whether rows with so many tokens of their own are attended in less time."""
        what = [self._line(1, LONG)], self._line(self._rows, own), SCALE, None

        def run(*, is_used: bool) -> mx.array:
            stem_kernel.choose(self.layer, is_used=is_used)
            return self._attend(*what)

        ways = partial(run, is_used=False), partial(run, is_used=True)
        won = gain(*ways, times=_TIMES)
        log.debug("one kernel behind stems is %.2f times as fast for %d own tokens", won, own)
        return won > _MARGIN

    def is_right_by_kernel(
        self, stems: int, summaries: int, has_mask: bool, has_sinks: bool
    ) -> bool:
        """Whether the kernel answers what MLX's own do, on few tokens, of which each matters."""
        shared = [self._line(1, FEW) for _ in range(stems)]
        # As a group has it: some of the rows that have a stem in common.
        twice = mx.concatenate([self._queries, self._queries])
        some = slice(1, self._rows + 1)
        before = [
            stem.sum_up(self._scheme, self._dtype, twice, self._line(1, FEW), SCALE).of(some)
            for _ in range(summaries)
        ]
        mask = mx.arange(FEW) >= self._first if has_mask else None
        sinks = 4 + mx.random.normal((self._queries.shape[1],)) if has_sinks else None
        what = shared, self._line(self._rows, FEW), SCALE, mask, sinks, before
        answers = []
        for is_used in (False, True):
            stem_kernel.choose(self.layer, is_used=is_used)
            answers.append(self._attend(*what))
        if are_close(*answers):
            return True
        log.warning("the kernel for stems answers otherwise than MLX's own: it is not used")
        return False

    def _attend(self, *rest: Any) -> mx.array:
        return stem.attend(self._path, self._scheme, self._dtype, self._queries, *rest)

    def _line(self, rows: int, tokens: int) -> tuple[Parts, Parts]:
        shape = self._scheme.shape
        keys, values = (
            mx.random.normal((rows, shape.num_heads, tokens, size)).astype(self._dtype)
            for size in (shape.key_size, shape.value_size)
        )
        return self._scheme.keys.pack(keys), self._scheme.values.pack(values)
