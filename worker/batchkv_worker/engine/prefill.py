"""Computes prompts: one group at a time, in chunks. Completed blocks go to the prefix memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from batchkv_worker.engine.schedule.scheduler import PrefillGroup, Scheduler
from batchkv_worker.kv.attention.shared_prefix import SharedPrefix
from batchkv_worker.kv.layers.contract import Chunk
from batchkv_worker.kv.layers.decode import DecodeSlots
from batchkv_worker.kv.layers.prefill_rows import PrefillRows
from batchkv_worker.kv.slots.changes import Arrival, Arrivals
from batchkv_worker.kv.start.plan import KvPlan
from batchkv_worker.kv.types import Pieces
from batchkv_worker.prefix.filling import fill
from batchkv_worker.prefix.interface import PrefixClient
from batchkv_worker.prefix.memory import PrefixCache
from batchkv_worker.trace import DECODE, ENGINE, PREFILL

TIMED_EVERY = 32  # chunks
NEW_SHARE = 0.2  # of a new sample in the moving average


# Of a group that was set aside: its prefill rows, shared prefix, parked row, and chunk size.
_Held = tuple[PrefillRows | None, SharedPrefix | None, list[Pieces] | None, int]


class Prefill:
    """The group whose prompts are being computed, and its prefill rows."""

    def __init__(
        self,
        model: Any,
        plan: KvPlan,
        scheduler: Scheduler,
        prefixes: PrefixCache,
        client: PrefixClient,
        make_rows: Callable[[int, int], PrefillRows],
        build: Callable[[PrefillGroup], SharedPrefix | None],
    ) -> None:
        """``make_rows``: for prompts and chunks of up to so many tokens. ``build``: prefixes."""
        self._model = model
        self._plan = plan
        self._scheduler = scheduler
        self._prefixes = prefixes
        self._chunk_tokens = scheduler.budget.chunk_tokens  # of the group in _rows
        self._client = client
        self._make_rows, self._build = make_rows, build
        self._num_chunks = 0
        self.num_computed = 0  # tokens of prompts, since the engine was built
        self.seconds_per_token = 0.0  # of computing prompts, a moving average; 0 before the first
        self._group: PrefillGroup | None = None  # whose prompts are in _rows
        self._rows: PrefillRows | None = None
        self.shared_prefix: SharedPrefix | None = None  # that its rows are computed after
        self._parked: list[Pieces] | None = None  # of a row that was computed before
        self._aside: tuple[PrefillGroup, _Held] | None = None
        self._traced: list[mx.array] = []  # of each chunk one number; see wait_for_traced
        self._new_traced: list[mx.array] = []

    @property
    def is_active(self) -> bool:
        """Whether prompts are held."""
        return self._rows is not None or self._aside is not None

    def next_group(self, *, is_decoding: bool = True) -> PrefillGroup | None:
        """The scheduler's group, whose prompts are held from now on. This computes nothing."""
        group = self._scheduler.next_group(is_decoding=is_decoding)
        if group is not self._group:
            self._exchange(group)
        return group

    def advance(self) -> PrefillGroup:
        """Compute the next chunk of the group that ``next_group`` gave."""
        group = self._group
        assert group is not None
        ENGINE.enter(PREFILL)
        if group.rows[0].parked and self._parked is None:
            self._parked = self._prefixes.parked(group.rows[0].parked)
            self._build_shared_prefix(group)
        elif group.width and self._rows is None and self._parked is None:
            self._chunk_tokens = self._scheduler.budget.chunk_tokens
            self._rows = self._make_rows(self._width(group), self._chunk_tokens)
            self._build_shared_prefix(group)
            shared, apart = self.shared_prefix, group.is_apart
            fill(self._rows, group.rows, self._prefixes, shared, apart=apart)
        if not group.is_computed:
            self._compute_chunk(group)
        ENGINE.enter(DECODE)
        return group

    def _exchange(self, group: PrefillGroup | None) -> None:
        """Begin this group, or go on with it. One that the scheduler set aside keeps its arrays."""
        if self._group is not None and self._group is self._scheduler.aside:
            held = (self._rows, self.shared_prefix, self._parked, self._chunk_tokens)
            self._aside, self._group = (self._group, held), None
        self.drop()
        if self._aside is not None and self._aside[0] is group:
            self._rows, self.shared_prefix, self._parked, self._chunk_tokens = self._aside[1]
            self._aside = None
        elif self._scheduler.aside is None:
            self._drop_aside()  # all its rows were cancelled
        self._group = group

    def _drop_aside(self) -> None:
        for row in self._aside[0].rows if self._aside else ():
            self._client.forget(row)
        self._aside = None

    def close(self) -> None:
        """Release all arrays, also those of a group that was set aside."""
        self.drop()
        self._drop_aside()

    def _mark(self, arrays: list[mx.array]) -> None:
        """Copy one number of a chunk: holding the chunk's own array would make MLX copy it."""
        if arrays and arrays[-1].size:
            number = arrays[-1][(0,) * arrays[-1].ndim].astype(mx.float32) + 0
            mx.async_eval(number)
            self._new_traced.append(number)

    def wait_for_traced(self) -> None:
        """For a trace: wait for the chunks that were started before the step in flight.

        The device computes them first, so this adds no waiting. The rest of the waiting is then
        counted for the step alone.
        """
        if self._traced:
            ENGINE.enter(PREFILL)
            mx.eval(self._traced)
            ENGINE.enter(DECODE)
        self._traced, self._new_traced = self._new_traced, []

    def _build_shared_prefix(self, group: PrefillGroup) -> None:
        self.shared_prefix = self._build(group)
        group.share(self.shared_prefix)

    def _width(self, group: PrefillGroup) -> int:
        """Where its longest row ends, in tokens, with padding for what is computed of it."""
        if not self._plan.traits.ragged:  # no row may have a pad
            return group.width
        cached = group.rows[0].num_cached
        return cached + self._plan.backend.padded_width(group.width - cached)

    def _compute_chunk(self, group: PrefillGroup) -> None:
        """One chunk of the group's prompts; logits are never read, so MLX never computes them."""
        assert self._rows is not None
        start = group.position
        chunk = self._chunk_tokens
        if not group.is_live:
            chunk = min(chunk, self._scheduler.chunk_tokens)
        end = group.chunk_end(chunk, self._width(group))
        width = end - start
        lengths = tuple(max(0, min(width, row.num_prefill - start)) for row in group.rows)
        self.num_computed += sum(lengths)
        started = self._start_watch()
        self._rows.begin(Chunk(start, width, None if min(lengths) == width else lengths))
        tokens = [
            row.tokens(start, start + length) + [0] * (width - length)
            for row, length in zip(group.rows, lengths, strict=True)
        ]
        self._model(mx.array(tokens), cache=self._plan.tree.nested(self._rows.layers))
        self._rows.end()
        self._rows.start()
        if ENGINE.is_traced:
            self._mark(self._rows.arrays)
        if started is not None:
            mx.eval(self._rows.arrays)
            self._observe(sum(lengths), time.perf_counter() - started)
        group.advance(end)
        self._prefixes.publish(group.rows, self._rows, start, end)

    def _start_watch(self) -> float | None:
        """The time at which this chunk starts, if it is timed; else None.

        The shared store must know what computing costs, and users what the cache saved. Chunks
        overlap with decoding, so for a few of them the device is waited for before and after. The
        first chunk compiles kernels and is not timed.
        """
        number, self._num_chunks = self._num_chunks, self._num_chunks + 1
        if not (0 < number <= 2 or number % TIMED_EVERY == TIMED_EVERY - 1):
            return None
        mx.synchronize()
        return time.perf_counter()

    def _observe(self, num_tokens: int, seconds: float) -> None:
        new, old = seconds / max(1, num_tokens), self.seconds_per_token
        self.seconds_per_token = new if not old else old + NEW_SHARE * (new - old)
        self._client.observe_prefill(num_tokens, seconds)

    def fill(self, slots: DecodeSlots, rows: list[Arrival]) -> None:
        """Copy rows of the computed group into the slots that they were given."""
        if not rows:
            return
        if self._rows is not None:
            slots.fill_group(Arrivals(rows), self._rows.layers)
            return
        for row in rows:  # choices of one parked row, or prompts of one token
            slots.fill(row.slot, self._parked)

    def drop(self) -> None:
        """Release the group's arrays: its rows are in slots, cancelled or requeued."""
        for row in self._group.rows if self._group else ():
            self._client.forget(row)
        self._group = self._rows = self._parked = self.shared_prefix = None
