"""The facts of batches and workers, as ``--json`` prints them and a gateway answers them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from batchkv_producer.interface import BatchClient
from batchkv_producer.monitor.mismatch import find_mismatch, why_passed_by
from batchkv_producer.monitor.remaining import percent_done
from batchkv_producer.monitor.status import BatchStatus
from batchkv_producer.monitor.workers import WorkerInfo
from batchkv_producer.report.counting import Counting
from batchkv_producer.results.stored_rows import StoredRow
from batchkv_producer.wire.job import Result

MAX_BAD_ROWS_SKIPPED = 200  # while the first row that a worker ran is searched
MAX_COUNTED_ROWS = 1_000  # of a batch, to find its pauses: their results are read, over a network

Left = Mapping[str, float]  # batch id -> seconds until it is done


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """What is known of a batch besides its status.

    ``serving``: the names of the workers that may compute its rows. ``passed_by``: name -> reason
    of those of its queue that may not. ``waits_for`` says which worker it needs, if none fits.
    ``num_apart``: rows of its queue that wait to run apart, because a worker died with them.
    """

    tokens_per_second: float | None
    seconds_left: float | None
    serving: tuple[str, ...]
    passed_by: Mapping[str, str]
    waits_for: str | None
    num_apart: int

    def as_fields(self, batch: BatchStatus) -> dict[str, Any]:
        """The fields of ``status BATCH --json``."""
        left = {} if self.seconds_left is None else {batch.batch_id: self.seconds_left}
        return {
            **batch_fields(batch, left),
            "tokens_per_second": self.tokens_per_second,
            "workers": list(self.serving),
            "passed_by": dict(self.passed_by),
            "waits_for": self.waits_for,
            "num_apart": self.num_apart,
        }


def facts_of(client: BatchClient, batch: BatchStatus) -> BatchFacts:
    """The facts of one batch now."""
    found = client.workers()
    here = serving_workers(client, batch, found)
    mismatch = find_mismatch(batch, here)
    passing = {worker.name: why_passed_by(batch, worker) for worker in here}
    return BatchFacts(
        tokens_per_second=tokens_per_second(client, batch),
        seconds_left=times_left(client, [batch], found).get(batch.batch_id),
        serving=tuple(name for name, why in passing.items() if not why),
        passed_by={name: why for name, why in passing.items() if why},
        waits_for=mismatch.note if mismatch else None,
        num_apart=client.count_apart(batch.queue) if batch.queued else 0,
    )


def batch_fields(batch: BatchStatus, left: Left | None = None) -> dict[str, Any]:
    """The fields of a batch for ``--json``."""
    return {
        **asdict(batch),
        "queued": batch.queued,
        "num_ended": batch.num_ended,
        "is_done": batch.is_done,
        "is_reconciled": batch.num_results == batch.num_ended,
        "percent_done": percent_done(batch),
        "seconds_left": (left or {}).get(batch.batch_id),
    }


def worker_dicts(found: Sequence[WorkerInfo]) -> list[dict[str, Any]]:
    """The fields of workers for ``--json``."""
    return [asdict(worker) for worker in found]


def listed_fields(
    client: BatchClient, found: Sequence[WorkerInfo], limit: int | None
) -> Iterator[dict[str, Any]]:
    """The fields of the newest batches for ``--json``, one by one."""
    left = all_times_left(client, found)
    for batch in itertools.islice(client.each_batch(), limit):
        yield batch_fields(batch, left)


def all_times_left(client: BatchClient, found: Sequence[WorkerInfo]) -> Left:
    """The time left of each open batch whose workers generate tokens."""
    busy = {queue for worker in found if worker.tokens_per_second for queue in worker.queues}
    return client.seconds_left(busy, found)


def times_left(
    client: BatchClient, shown: Sequence[BatchStatus], found: Sequence[WorkerInfo]
) -> Left:
    """The time left of each batch, where it is known. It includes batches that are not shown."""
    busy = {queue for worker in found if worker.tokens_per_second for queue in worker.queues}
    queues = busy & {batch.queue for batch in shown if not batch.is_done}
    return client.seconds_left(queues, found)


def serving_workers(
    client: BatchClient, batch: BatchStatus, found: Sequence[WorkerInfo]
) -> Sequence[WorkerInfo]:
    """The workers of a batch's queue. Those with adapters are read as this queue sees them."""
    here = [worker for worker in found if batch.queue in worker.queues]
    return client.serving(batch.queue) if any(worker.adapters for worker in here) else here


def tokens_per_second(client: BatchClient, batch: BatchStatus) -> float | None:
    """Generated tokens a second of the time in which rows were under way, as a report has it.

    If pauses count, it is from the first row's start to the last row's end (or to now). None if no
    token was generated yet, or if the times of rows are not known: files do not have them.
    """
    if not (batch.completion_tokens and batch.busy_ms):
        return None
    if not counts_pauses(batch):
        counting = Counting(batch.created, time.time())
        for row in client.results(batch.batch_id):
            counting.add(row.line, row.result, is_copy=row.result.reused)
        return counting.facts(batch, {}, ()).tokens_per_second
    # A retried row keeps its place in the order, with the time of its new result.
    began: Callable[[Result], float] = lambda row: row.created - row.busy_ms / 1000  # noqa: E731
    first = min(_rows_run(client.results(batch.batch_id)), key=began, default=None)
    if first is None:
        return None
    end = _last_end(client, batch) if batch.is_done else time.time()
    return batch.completion_tokens / max(end - began(first), first.busy_ms / 1000, 0.001)


def counts_pauses(batch: BatchStatus) -> bool:
    """Whether its speed counts pauses, because it has too many rows to read all of them."""
    return batch.num_ended > MAX_COUNTED_ROWS


def _rows_run(rows: Iterator[StoredRow]) -> Iterator[Result]:
    for row in itertools.islice(rows, MAX_BAD_ROWS_SKIPPED):
        if row.result.busy_ms:
            yield row.result


def _last_end(client: BatchClient, batch: BatchStatus) -> float:
    ends: Callable[[StoredRow], float] = lambda row: row.result.created  # noqa: E731
    after = max(0, batch.num_ended - 1)
    return max(map(ends, client.results(batch.batch_id, after=after)), default=time.time())
