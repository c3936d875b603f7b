"""The engine: continuous batching over decode slots. ``step`` is schedule, run, finish.

One thread owns it and MLX. ``prepare`` alone may run beside it, and what launches on CUDA. A step
has three parts:

(a) compute prompt chunks while slots are free;
(b) build the graph of the next decode step while the last step still runs;
(c) wait for the last step, start the next one, and then read the tokens of the last.

So building, most of Python's work, overlaps with the device. A layer starts when the last step has
computed it. Then nothing else refers to its buffers, and MLX writes into them in place. On a CPU,
(b) starts each layer as it is built (``Backend.starts_each_layer``). On CUDA, (b) of the next step
overlaps with launching this one, whose first layers start while the last step ends
(``kv/backends/launching``).

If a row has a guide, such as a grammar, (b) builds the step's logits alone. Its tokens are chosen
after (c), while the device computes the logits (``decode_step``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import partial

import mlx.core as mx

from batchkv_producer.wire.constraint import Constraint
from batchkv_producer.wire.job import ErrorCode
from batchkv_worker.engine.answers.preparing import Preparing
from batchkv_worker.engine.audit import Audit
from batchkv_worker.engine.chunk_size import choose_chunk
from batchkv_worker.engine.config import EngineConfig
from batchkv_worker.engine.decode_rows import DecodeRows
from batchkv_worker.engine.decode_step import OpenStep, Step, build_step, choose, start
from batchkv_worker.engine.diagnostics import Diagnostics
from batchkv_worker.engine.grammar.grammars import Grammars
from batchkv_worker.engine.live import LiveRows
from batchkv_worker.engine.prefill import Prefill
from batchkv_worker.engine.pressure import NoPressure, Pressure
from batchkv_worker.engine.recovery import Recovery
from batchkv_worker.engine.relief import Relief
from batchkv_worker.engine.row_ends import RowEnds
from batchkv_worker.engine.schedule.scheduler import Budget, Scheduler
from batchkv_worker.engine.shared_prefixes import SharedPrefixBuilder
from batchkv_worker.engine.tokens.choices import Choices
from batchkv_worker.engine.tokens.requests import check_memory
from batchkv_worker.engine.tokens.sampling import FewTokens
from batchkv_worker.engine.tokens.text_limits import RowRefused, refusals
from batchkv_worker.events import Event, Work
from batchkv_worker.faults import graver, is_at_once, is_device_fault, is_out_of_memory
from batchkv_worker.kv.backends.launching import choose as choose_launches
from batchkv_worker.kv.start.backend import choose_backend
from batchkv_worker.kv.start.decision import Fixed
from batchkv_worker.kv.start.plan import make_plan
from batchkv_worker.model.loader import LoadedModel
from batchkv_worker.prefix.interface import NoSharedPrefixes, PrefixClient
from batchkv_worker.prefix.memory import PrefixCache
from batchkv_worker.prefix.shared.access import Access
from batchkv_worker.prefix.shared.client import StoreClient
from batchkv_worker.sequence import Sequence, Status

__all__ = ["Engine", "EngineConfig"]

log = logging.getLogger("batchkv.engine")

CHUNKS_PER_STEP = 8  # prompt chunks at most in a step in which no row decodes
STILL_SECONDS = 0.02  # of one wait for the store when the engine has nothing else to do


class Engine:
    """Implements ``events.EngineLike`` over one loaded model."""

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        access: Access | None = None,
        pressure: Pressure | None = None,
    ) -> None:
        self.num_slots, self.max_in_flight = config.slots, config.slots + config.prefetch
        self.plan = plan = make_plan(
            *(loaded.name, loaded.model, loaded.caches, config.scheme, loaded.dtype),
            config.backend or choose_backend(),
            slots=config.slots,
            fixed=Fixed(config.path, config.group_cost, config.prefix_cells),
        )
        client: PrefixClient = StoreClient(access, loaded, plan) if access else NoSharedPrefixes()
        self.loaded, self.config, self.client = loaded, config, client
        self.prefixes = PrefixCache(
            config.memory_bytes // 8 if config.prefix_bytes is None else config.prefix_bytes,
            *(plan.costs, plan.kinds, client.root, client.on_new),
        )
        client.attach(self.prefixes)
        self._launches = launches = config.launches(plan, choose_launches)
        chunk = config.chunk_tokens or choose_chunk(loaded, plan, client.observe_prefill, launches)
        limits = config.memory_bytes - self.prefixes.max_bytes, plan.costs, plan.shapes.step
        self._slots = plan.slots(config.slots, launches.join)
        self._scheduler = Scheduler(
            *(self._slots.layouts, Budget(chunk, *limits, plan.backend.chunk_steps)),
            *(self.prefixes.num_cached, self._is_ready),
            shares=config.share and plan.shares,
            prefix_costs=config.prefix_costs(plan),
            ragged=plan.traits.ragged,
            drop_buffers=self._slots.drop,
            state_blocks=self.prefixes.max_blocks if plan.has_state else 0,
            is_optimistic=config.admission == "optimistic",
            uses=self.prefixes.eviction,
        )
        self._builder, self._is_in_prefill = SharedPrefixBuilder(self._slots, self.prefixes), False
        self._prefill = Prefill(
            *(loaded.model, plan, self._scheduler, self.prefixes, client),
            *(plan.prompts(launches), self._builder.of_group),
        )
        self._preparing, self._grammars = Preparing(loaded), Grammars(loaded)
        self._decode_rows = DecodeRows(
            *(self._slots, self._scheduler, self.prefixes, self._prefill, self._builder)
        )
        self._rows, self.prepares_ahead = self._decode_rows.by_slot, self._preparing.num_threads
        self._choices, self._live = Choices(), LiveRows(self._decode_rows, config.lane_chunk)
        self.maker, self.has_changed = loaded.maker(config.scheme), loaded.has_changed
        self._recovery = Recovery(self._prefill, self._decode_rows, self.prefixes, client)
        self._relief = Relief(pressure or NoPressure(), self._decode_rows, self.prefixes)
        self._few_tokens = FewTokens(plan.backend.draw_kernel(), launches.join)
        self._in_flight: Step | None = None
        self._upcoming: Step | OpenStep | None = None  # built, and not started as a whole
        self._ends = RowEnds(
            *(loaded, self._decode_rows, self._prefill, Audit(config.audit, client.count)),
            *(self._choices, client, self._cancel),
        )
        self._diagnostics = Diagnostics(self._ends, self._recovery, self._relief)
        self.report, self.memory_bytes, self.figures, self.progress = self._diagnostics.readers

    @property
    def is_idle(self) -> bool:
        if self._in_flight is not None or self._ends.events or not self._scheduler.is_idle:
            return False
        return not self.client.is_busy

    def add(self, work: Work) -> None:
        """Queue a row; one that can never run is rejected with the next step's events."""
        self.prepare(work)()

    def prepare(self, work: Work) -> Callable[[], None]:
        """Make a row, on any thread. What is returned queues it, on the engine's thread."""
        try:
            shared = self.client.counts_shared
            made = self._preparing.prepare(work, counts_shared=shared)
        except RowRefused as refusal:
            return partial(self._ends.refuse, work.job_id, refusal.code, str(refusal))
        return partial(self._queue, work, *made)

    def _queue(self, work: Work, row: Sequence, constraint: Constraint | None) -> None:
        try:
            with refusals("the prompt cannot be prepared"):
                self._live.attach(row, work, self.loaded.tokenizer)
                self.submit_row(row, work.num_choices, work.num_wanted, constraint)
        except RowRefused as refusal:
            self._ends.refuse(work.job_id, refusal.code, str(refusal))

    def submit_row(
        self,
        row: Sequence,
        num_choices: int = 1,
        num_wanted: int = 1,
        constraint: Constraint | None = None,
    ) -> None:
        """Queue a tokenized row; raises RowRefused when it can never fit the memory.

        Its other choices, if it has several, fit if the first one fits. The result has
        ``num_wanted``: as many, or one repeated. The row waits until ``constraint`` is compiled.
        """
        check_memory(row, self._scheduler.memory)
        self._grammars.begin(row, constraint)
        self.prefixes.name(row)
        counts = num_choices, max(num_choices, num_wanted)
        self._choices.add(row, *counts, lambda: self.loaded.tokenizer.detokenizer)
        self.client.begin(row)
        self._scheduler.add(row)

    def cancel(self, job_id: str) -> None:
        """End a row and all its choices; unknown ids are ignored. No event follows."""
        self._cancel(job_id)
        for one in self._choices.leave(job_id):
            self._cancel(one)

    def _cancel(self, job_id: str) -> None:
        """End one choice of a row, wherever it is; unknown ids are ignored."""
        waited = self._scheduler.cancel(job_id)
        if waited is not None:
            self.prefixes.forget(waited.parked)
            if not self._scheduler.is_in_prefill(waited):  # that one is released with its group
                self.client.forget(waited)
            return
        row = next((row for row in self._rows.values() if row.job_id == job_id), None)
        if row is not None:
            row.end("canceled")
            self._decode_rows.free(row)
            return
        for step in (self._in_flight, self._upcoming):  # its last token is being computed
            for one in step.rows if step else ():
                if one is not None and one.job_id == job_id:
                    one.end("canceled")

    def recall(self, job_ids: Collection[str], count: int) -> list[str]:
        """Cancel some of these rows, the last first, if they wait and were never begun.

        Each choice counts, and up to ``count`` are cancelled. Returns the ids of the rows.
        """
        found = self._choices.fresh(self._scheduler.waiting, job_ids, count)
        for job_id in found:
            self.cancel(job_id)
        return found

    def step(self) -> list[Event]:
        """Compute some prompt chunks and one decode step. Returns events of rows that ended."""
        self._recovering(self._step)
        self._diagnostics.record()
        events, self._ends.events = self._ends.events, []
        return events

    def _recovering(self, work: Callable[[], None]) -> None:
        """Do work. If memory runs out or the device fails meanwhile, recover.

        If it cannot go on, no block that is not sent yet may reach others: it may be wrong.
        """
        try:
            work()
        except (RuntimeError, MemoryError) as fault:
            try:
                if not is_out_of_memory(fault) and not is_device_fault(fault):
                    raise
                self._recover(graver(fault, self._launches.settle()))
            except (RuntimeError, MemoryError):
                self.client.drop_unsent()
                raise

    def _step(self) -> None:
        self._relief.apply(self._read_in_flight)
        for row, refusal in self._grammars.advance():
            self.cancel(row.job_id)
            self._ends.refuse(row.job_id, refusal.code, str(refusal))
        self.client.advance(self._scheduler.waiting)
        self._live.make_way(self._read_in_flight)
        self._run_prefill()
        self._decode_rows.make_room(self._read_in_flight)
        upcoming = self._build_step() if self._rows else None
        landed = self._in_flight
        self._launches.join()
        self._prefill.wait_for_traced()
        read = start(upcoming, landed, self._slots, self._launches)
        if landed is not None and read is not None:
            self._ends.read(landed, read)
        if isinstance(upcoming, OpenStep):
            upcoming = self._choose(upcoming)
        self._in_flight, self._upcoming = upcoming, None
        if not self._scheduler.num_waiting:
            self._decode_rows.close_gaps()
        self._serve_store(is_still=landed is None and upcoming is None)

    def _recover(self, fault: Exception) -> None:
        """Requeue the rows that are lost, and end those that failed too often."""
        steps = [step for step in (self._in_flight, self._upcoming) if step]
        in_prefill, self._is_in_prefill = self._is_in_prefill and is_at_once(fault), False
        if not in_prefill:
            self._in_flight = self._upcoming = None
        for row in self._recovery.recover(fault, steps, in_prefill=in_prefill):
            message = f"memory ran out twice for this row alone: {fault}"[:300]
            self._ends.stop(row, ErrorCode.OUT_OF_MEMORY, message)

    def _read_in_flight(self) -> bool:
        """Read the step in flight before the next one is built. Returns whether there was one."""
        self._launches.join()
        landed = self._in_flight
        if landed is not None:
            self._ends.read(landed, landed.fetch())
            self._in_flight = None
        return landed is not None

    def _serve_store(self, *, is_still: bool) -> None:
        """Send computed blocks; wait for the store when all waiting rows wait for it."""
        is_still = is_still and not self._prefill.is_active
        self.client.send(is_idle=is_still, before_waiting=self._launches.join)
        if (
            is_still
            and not self._ends.events
            and (self._scheduler.num_waiting or self.client.is_busy)
        ):
            self.client.wait(STILL_SECONDS)
            self._grammars.wait(STILL_SECONDS)

    def rest(self) -> None:
        """Idle for a while: give back the memory that MLX keeps to use again."""
        self._recovering(self._rest)
        self._diagnostics.record()

    def _rest(self) -> None:
        self._launches.join()
        self._relief.apply(self._read_in_flight)
        mx.clear_cache()

    def trouble(self) -> str:
        """Why rows wait that could run, for the worker's record."""
        return self._relief.words

    def close(self) -> None:
        """Drop all rows and buffers."""
        self._launches.close()
        self._relief.close()
        self._ends.close()
        self.client.close()
        self._grammars.close()
        self._rows.clear()
        self._slots.close()
        self._prefill.close()
        self.prefixes.clear()
        self._in_flight = None
        self.plan.undo()
        mx.clear_cache()

    def check_integrity(self) -> None:
        """Raise AssertionError if a slot is neither free nor has exactly one row."""
        self._slots.check()
        assert self._slots.layouts.main.slots == set(self._rows)
        assert all(row.slot == slot for slot, row in self._rows.items())
        self._choices.check(is_idle=self.is_idle)
        if self.is_idle:
            assert not self._rows and not self._prefill.is_active

    @property
    def kv_bytes(self) -> int:
        """Bytes of the decode slots' buffers as they are now."""
        return self._slots.nbytes

    @property
    def chunk_tokens(self) -> int:
        """Prompt tokens that are computed at once."""
        return self._scheduler.budget.chunk_tokens

    @property
    def bytes_per_token(self) -> int:
        """Bytes that a token takes while every layer keeps it."""
        return self.plan.costs.per_new_token

    def _is_ready(self, row: Sequence) -> bool:
        """Whether a row that waits may be computed now."""
        return self._grammars.is_ready(row) and self.client.is_ready(row)

    def _run_prefill(self) -> None:
        """Compute prompt chunks for free slots: rows that start together end together.

        While rows decode, these are few, and a prompt's next chunk has to wait for a step.
        """
        is_decoding = bool(self._rows)  # those that come in below have not begun to
        for _ in range(self._live.chunks_beside if is_decoding else CHUNKS_PER_STEP):
            if self._prefill.next_group(is_decoding=is_decoding) is None:
                return
            self._launches.join()
            self._is_in_prefill = True
            group = self._prefill.advance()
            self._is_in_prefill = False
            goes_on = not is_decoding
            if group.is_computed:
                goes_on = self._decode_rows.insert(group, self._in_flight)
            if not goes_on:
                return
            self.client.send(is_idle=False, before_waiting=self._launches.join)

    def _build_step(self) -> Step | OpenStep:
        """Build the next step, as far as it can be built while the last one runs."""
        rest = self._rows, self._in_flight, self._few_tokens
        early = self._launches.starts_early
        step = build_step(self.loaded.model, self._slots, *rest, starts_early=early)
        self._upcoming = step
        if isinstance(step, Step):
            self._note_start(step)
        return step

    def _note_start(self, step: Step) -> None:
        """Its rows have one token more; those that need no other leave their slots."""
        self._upcoming = step
        for row in step.rows:
            if row is not None:
                row.start_step()
                if row.status is Status.LAST_TOKEN:  # the slot is free for the next step
                    self._decode_rows.free(row)

    def _choose(self, step: OpenStep) -> Step:
        """Choose the tokens of a step with guided rows, and start that."""
        self._launches.join()
        chosen = choose(step, self._grammars, self._ends.stop, self._few_tokens)
        self._note_start(chosen)
        mx.async_eval(chosen.arrays)
        return chosen
