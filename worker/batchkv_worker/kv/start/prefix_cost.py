"""Measures how many cells a shared prefix must save to be worth its kernels, on this device.

A prefix that is stored once is read once for all of its rows. But attention over a prefix and over
each row's own tokens launches more kernels than attention over all tokens of a row at once. Both
are timed for a short and for a long prefix. The times give the number of cells that must be saved.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from batchkv_worker.faults import is_device_fault
from batchkv_worker.kv.attention import shared_prefix
from batchkv_worker.kv.attention.paths import LayerAttention, attend
from batchkv_worker.kv.attention.records import attend as attend_records
from batchkv_worker.kv.attention.records import bounds_of, kernels_of, partials_for_all
from batchkv_worker.kv.backends.compare import are_close
from batchkv_worker.kv.backends.contract import PrefixKernel
from batchkv_worker.kv.backends.measurements import Codec
from batchkv_worker.kv.backends.timing import Way, gain, least_times
from batchkv_worker.kv.start.pathcheck import KERNEL, PathCheck, check_prefix, worst
from batchkv_worker.kv.types import PackedKV

log = logging.getLogger("batchkv.engine")

UNMEASURED = 768  # cells: a block of 256 tokens that four rows share
# A busy machine may give any number; and a prefix saves memory, which no clock shows.
LEAST, MOST = 256, 16_384
SHORT, LONG = 64, 1024  # tokens of the prefixes that are timed
OWN = 64  # tokens that each row has after them
SCALE = 0.125  # of the scores, as in most models

FEW = 24  # tokens that show whether the kernel is right
# Of prefixes and partial results, with a mask, with sinks: those that a step may need, and all.
_KINDS = [(1, 0, False, False), (1, 0, True, False), (0, 1, True, False), (2, 1, True, True)]
_MARGIN = 1.05  # by which the kernel has to be faster: timed in turns, it varies by less
_TIMES = 8  # of it that are timed together


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


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """Whether the backend's kernel for shared prefixes is used; ``checks``: of its results."""

    is_used: bool
    checks: tuple[PathCheck, ...] = ()


def _kernel_from_json(value: Any) -> KernelChoice:
    if type(value["is_used"]) is not bool:
        raise TypeError(f"{value['is_used']!r} is neither true nor false")
    return KernelChoice(value["is_used"], tuple(map(PathCheck.from_json, value["checks"])))


KERNEL_CHOICE: Codec[KernelChoice] = Codec(
    lambda choice: {
        "is_used": choice.is_used,
        "checks": [check.as_json() for check in choice.checks],
    },
    _kernel_from_json,
)


def kernel_of(layer: LayerAttention, num_query_heads: int) -> PrefixKernel | None:
    """The backend's kernel for such layers, if it has one."""
    if layer.is_packed or layer.records is not None:
        return None
    lines = num_query_heads // layer.scheme.shape.num_heads
    return layer.backend.prefix_kernel(layer.scheme, lines, layer.dtype)


def choose_kernel(
    layer: LayerAttention, num_query_heads: int, kernel: PrefixKernel, *, num_rows: int
) -> KernelChoice:
    """Whether a kernel is right, and faster than MLX's own."""
    checks: tuple[PathCheck, ...] = ()
    try:
        checks = check_prefix(replace(layer, kernel=kernel), num_query_heads)
        if not (fault := worst(checks, KERNEL)).is_ok:
            log.warning("the kernel for shared prefixes is not used: %s", fault)
            return KernelChoice(False, checks)
        sample = _Sample(layer, num_query_heads, max(2, num_rows))
        is_right = all(sample.is_right_by(kernel, *kind) for kind in _KINDS)
        is_used = is_right and all(sample.is_faster_by(kernel, own) for own in (OWN, LONG))
    except (ValueError, RuntimeError) as fault:  # MLX raises these if it cannot compile a kernel
        if is_device_fault(fault):
            raise
        log.warning("the kernel for shared prefixes is not used: %s", fault)
        return KernelChoice(False, checks)
    return KernelChoice(is_used, checks)


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
        if layer.records is not None:
            return self._ways_of_kernel(lines, shared, own, tokens)
        return (
            lambda: attend(layer, queries, *lines, SCALE, whole),
            lambda: shared_prefix.attend(layer, queries, [shared], own, SCALE, rest),
        )

    def _ways_of_kernel(
        self, lines: PackedKV, shared: PackedKV, own: PackedKV, tokens: int
    ) -> tuple[Way, Way]:
        """The same where slots keep records."""
        layer, rows, queries = self._layer, self._rows, self._queries
        join = kernels_of(layer).layout.join
        whole, rest = join(*lines), join(*own)
        firsts = [min(row, OWN - 1) for row in range(rows)]
        both = [bounds_of(firsts, [count] * rows) for count in (tokens + OWN, OWN)]
        mx.eval(whole, rest, both)

        def with_prefix() -> mx.array:
            before = partials_for_all(layer, queries, [shared], SCALE)
            return attend_records(layer, queries, rest, both[1], OWN, SCALE, partials=before)

        return (
            lambda: attend_records(layer, queries, whole, both[0], tokens + OWN, SCALE),
            with_prefix,
        )

    def is_faster_by(self, kernel: PrefixKernel, own: int) -> bool:
        """Whether rows with so many tokens of their own are attended in less time."""
        what = [self._line(1, LONG)], self._line(self._rows, own), SCALE, None
        plain, by_kernel = self._layer, replace(self._layer, kernel=kernel)
        won = gain(
            lambda: shared_prefix.attend(plain, self._queries, *what),
            lambda: shared_prefix.attend(by_kernel, self._queries, *what),
            times=_TIMES,
        )
        log.debug("one kernel for prefixes is %.2f times as fast for %d own tokens", won, own)
        return won > _MARGIN

    def is_right_by(
        self, kernel: PrefixKernel, prefixes: int, partials: int, has_mask: bool, has_sinks: bool
    ) -> bool:
        """Whether the kernel agrees with MLX's own, on few tokens, of which each matters."""
        shared = [self._line(1, FEW) for _ in range(prefixes)]
        # As a group has it: some of the rows that have a prefix in common.
        twice = mx.concatenate([self._queries, self._queries])
        some = slice(1, self._rows + 1)
        before = [
            shared_prefix.attend_partial(self._layer, twice, self._line(1, FEW), SCALE).of(some)
            for _ in range(partials)
        ]
        mask = mx.arange(FEW) >= self._first if has_mask else None
        sinks = 4 + mx.random.normal((self._queries.shape[1],)) if has_sinks else None
        what = self._queries, shared, self._line(self._rows, FEW), SCALE, mask, sinks, before
        plain = shared_prefix.attend(self._layer, *what)
        found = shared_prefix.attend(replace(self._layer, kernel=kernel), *what)
        if are_close(plain, found):
            return True
        log.warning("the kernel for shared prefixes gives other answers than MLX's: not used")
        return False

    def _line(self, rows: int, tokens: int) -> PackedKV:
        scheme = self._layer.scheme
        keys, values = (
            mx.random.normal((rows, scheme.shape.num_heads, tokens, size)).astype(self._layer.dtype)
            for size in (scheme.shape.key_size, scheme.shape.value_size)
        )
        return scheme.keys.pack(keys), scheme.values.pack(values)
