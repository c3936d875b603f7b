"""Sends a sealed plan to Redis: creates or joins the batch, then queues its chunks in order."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from batchkv_producer.errors import BatchkvError
from batchkv_producer.intake.formats import RowError
from batchkv_producer.intake.prompting import AUTO, Prompting, as_raw
from batchkv_producer.manage.forget import forget_batch
from batchkv_producer.order.planner import BatchPlan, Chunk, PlanCounts
from batchkv_producer.order.prefix_order import ORDER_VERSION
from batchkv_producer.submit.generations import Generation, OtherMakingError
from batchkv_producer.submit.kept_answers import EarlierBatch
from batchkv_producer.submit.older_rules import RULES_VERSION, check_chunks
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.batch_options import NO_OPTIONS, BatchOptions, differences
from batchkv_producer.wire.job import Result, SamplingParams, encode_result
from batchkv_producer.wire.kept_defaults import encode_defaults
from batchkv_producer.wire.maker import Maker
from batchkv_producer.wire.row_facts import NO_FACTS
from batchkv_producer.wire.transitions import BatchRecord, Transitions

DEFAULT_JOB_TIMEOUT_SECONDS = 3600
MAX_IN_FLIGHT = 2  # chunks: Redis stores one while the next is read and packed

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class BatchSpec:
    """The caller's description of a batch, without its rows."""

    model: str
    defaults: SamplingParams
    job_timeout_seconds: int = DEFAULT_JOB_TIMEOUT_SECONDS
    name: str = ""
    options: BatchOptions = NO_OPTIONS
    prompting: Prompting = AUTO
    earlier: EarlierBatch | None = None


def enqueue(
    transitions: Transitions,
    plan: BatchPlan,
    counts: PlanCounts,
    generation: Generation,
    spec: BatchSpec,
    on_progress: Progress | None = None,
) -> tuple[bool, tuple[str, ...]]:
    """Queue the chunks that are not in the queue yet.

    Returns whether the batch existed, and sentences about the options that it keeps.
    ``on_progress`` gets (rows in the queue, rows in all). Raises BatchkvError if the server has
    another batch with this id, OtherMakingError if the batch has another maker.
    """
    batch_id = generation.batch_id
    there, start = _create_or_join(transitions, generation, counts, spec, plan.needs())
    if 0 < start < counts.num_chunks:
        check_chunks(transitions.connection, batch_id, plan.chunks(), start)
    # The plan already has --raw; a later batch has it in its id.
    is_older = there.style != "auto" and not spec.prompting.raw
    if start < counts.num_chunks and is_older:
        _check_raw(batch_id, plan, counts, spec)
    num_rows = plan.num_rows_before(start)
    in_flight: deque[tuple[Chunk, Future[int]]] = deque()

    def confirm_oldest() -> None:
        nonlocal num_rows
        chunk, future = in_flight.popleft()
        _check_reply(batch_id, chunk.number, future.result())
        num_rows += len(chunk)
        if on_progress is not None:
            on_progress(num_rows, counts.total)

    # One thread keeps the chunks in order. The end of the block waits for the last of them.
    with ThreadPoolExecutor(max_workers=1) as pool:
        for planned in plan.chunks(start):
            chunk = _raw_chunk(planned) if is_older and plan.num_plain else planned
            if len(in_flight) == MAX_IN_FLIGHT:
                confirm_oldest()
            in_flight.append((chunk, pool.submit(_send, transitions, batch_id, spec, chunk)))
        while in_flight:
            confirm_oldest()
    return start > 0, (differences(there, spec.options) if start else ())


def _create_or_join(
    transitions: Transitions,
    generation: Generation,
    counts: PlanCounts,
    spec: BatchSpec,
    needs: str,
) -> tuple[BatchRecord, int]:
    """The batch on the server, and the number of the first chunk that is not in the queue yet."""
    batch_id, digest = generation.batch_id, generation.digest
    there = transitions.create(
        batch_id,
        {
            "digest": digest,
            "name": spec.name,
            "model": spec.model,
            "queue": redis_keys.queue_name(spec.model),
            "total": counts.total,
            "num_chunks": counts.num_chunks,
            "order": ORDER_VERSION,
            "rules": RULES_VERSION,
            "last_line": counts.last_line,
            "job_timeout": spec.job_timeout_seconds,
            "defaults": encode_defaults(spec.defaults),
            **generation.fields(),
            **spec.prompting.as_fields(),
            **({"needs": needs} if needs else {}),
            **spec.options.as_fields(transitions.server_seconds),
        },
        spec.options.maker.fields() if not spec.options.mixed else _weights(spec.options.maker),
        is_mixed=spec.options.mixed,
    )
    if there.is_forgotten:
        forget_batch(transitions.connection, batch_id)
        return _create_or_join(transitions, generation, counts, spec, needs)
    if there.digest != digest:
        raise BatchkvError(f"another batch has the id {batch_id} (its digest is {there.digest})")
    if not there.fits:
        raise OtherMakingError(f"batch {batch_id} is computed with something else")
    if there.num_enqueued == there.num_chunks:
        return there, counts.num_chunks  # all rows are there; their order no longer matters
    if there.is_deduped != spec.options.dedupe:
        how = "with --dedupe" if there.is_deduped else "without --dedupe"
        raise BatchkvError(f"batch {batch_id} was begun {how}: finish the submit the same way")
    if (there.num_chunks, there.order) != (counts.num_chunks, ORDER_VERSION):
        raise BatchkvError(
            f"batch {batch_id} was begun by a version of batchkv that orders rows differently; "
            "finish the submit with that version"
        )
    return there, there.num_enqueued


def _weights(maker: Maker) -> dict[str, str]:
    """The part of the maker that all workers of a mixed batch have in common."""
    return Maker(maker.fingerprint).fields()


def _check_raw(batch_id: str, plan: BatchPlan, counts: PlanCounts, spec: BatchSpec) -> None:
    """Refuse to finish a batch without styles if it has --dedupe and some plain prompts."""
    if spec.options.dedupe and 0 < plan.num_plain < counts.total:
        raise BatchkvError(
            f"batch {batch_id} was begun by a version of batchkv that sent all prompts as they "
            "are; finish the submit with that version"
        )


def _raw_chunk(chunk: Chunk) -> Chunk:
    """The chunk for a batch of a version without styles: all prompts are sent unchanged."""
    return replace(
        chunk,
        jobs=[(line, as_raw(data), shared) for line, data, shared in chunk.jobs],
        duplicates=[
            (line, as_raw(data), own_id, first) for line, data, own_id, first in chunk.duplicates
        ],
        needs={},
        facts=NO_FACTS,
        kept={},
        reuse={},
    )


def _send(transitions: Transitions, batch_id: str, spec: BatchSpec, chunk: Chunk) -> int:
    queue = redis_keys.queue_name(spec.model)
    number, seconds = chunk.number, spec.job_timeout_seconds
    more = (seconds, chunk.needs, chunk.facts, chunk.reuse)
    if chunk.duplicates:
        return transitions.follow(batch_id, queue, number, chunk.duplicates, *more)
    bad_rows = [(row.line, encode_result(_as_result(row, spec.model))) for row in chunk.bad_rows]
    if chunk.kept and spec.earlier is not None and not spec.earlier.why_not:
        earlier = (spec.earlier.batch_id, spec.earlier.num_ended)
        rows = (chunk.jobs, bad_rows)
        return transitions.submit(
            *(batch_id, queue, number, *rows),
            *more,
            kept=chunk.kept,
            earlier=earlier,
            cut=spec.earlier.cut_lines,
            starts=chunk.starts,
        )
    return transitions.submit(
        batch_id, queue, number, chunk.jobs, bad_rows, *more, starts=chunk.starts
    )


def _as_result(row: RowError, model: str) -> Result:
    return Result(
        custom_id=row.custom_id,
        endpoint=row.endpoint,
        outcome="failed",
        model=model,
        error=(row.code, row.message),
        created=int(time.time()),
    )


def _check_reply(batch_id: str, chunk: int, num_enqueued: int) -> None:
    """Check that the chunk is enqueued now, by this submit or another one."""
    if num_enqueued <= chunk:
        raise BatchkvError(
            f"batch {batch_id} vanished from the server while it was submitted; submit it again"
        )
