"""Estimates when batches will be done, from the tokens a second of their workers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from batchkv_producer.monitor.status import BatchStatus
from batchkv_producer.monitor.workers import WorkerInfo
from batchkv_producer.wire.redis_keys import PRIORITIES

LEAST_SECONDS = 1.0  # while any row is open


def seconds_left(batches: Iterable[BatchStatus], workers: Sequence[WorkerInfo]) -> dict[str, float]:
    """Batch id -> seconds until the batch is done, for the batches that have an estimate.

    A queue's batches run one after the other, urgent ones first. An open row is expected to
    generate as many tokens as the mean of the ok rows. A batch without ok rows has no estimate, nor
    have the batches after it. There is none either while a worker that is asleep or dead holds
    rows, because they wait until its lease ends.
    """
    found: dict[str, float] = {}
    queues: dict[str, list[BatchStatus]] = {}
    for batch in batches:
        if not batch.is_done:
            queues.setdefault(batch.queue, []).append(batch)
    for queue, waiting in queues.items():
        serving = [worker for worker in workers if queue in worker.queues]
        if any(worker.is_away and worker.num_running for worker in serving):
            continue
        working = [worker for worker in serving if not (worker.is_away or worker.is_resting)]
        rate = sum(worker.tokens_per_second or 0 for worker in working)
        num_tokens = 0.0
        for batch in sorted(waiting, key=queue_order):
            if not rate or not batch.ok or not batch.completion_tokens:
                break
            num_open = batch.total - batch.num_ended
            num_tokens += num_open * batch.completion_tokens / batch.ok
            found[batch.batch_id] = max(LEAST_SECONDS, num_tokens / rate)
    return found


def queue_order(batch: BatchStatus) -> tuple[int, int]:
    """A key by which batches of one queue are computed first."""
    rank = PRIORITIES.index(batch.priority) if batch.priority in PRIORITIES else 1
    return rank, batch.created


def share_done(batch: BatchStatus) -> str:
    """The share of rows that have ended. A batch whose lines were all refused has no rows."""
    is_refused = batch.is_done and not batch.total
    return "no rows" if is_refused else f"{percent_done(batch)} %"


def percent_done(batch: BatchStatus) -> int:
    """The per cent of rows that have ended, rounded down. 100 only if all have ended."""
    return 100 if batch.is_done else min(99, 100 * batch.num_ended // max(1, batch.total))
