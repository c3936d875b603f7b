"""The Python interface of batchkv: submit a file, follow its batch, read the results.

>>> client = Client(Redis.from_url("unix:///tmp/redis.sock"))
>>> batch = client.submit(Path("prompts.jsonl"), model="demo").batch_id
>>> for row in client.results(batch, follow=True):
...     print(row.result.custom_id, row.result.text)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

from redis import Redis

from batchkv_producer.errors import UsageError
from batchkv_producer.intake.given_rows import Given, as_source
from batchkv_producer.intake.prompting import AUTO, Prompting
from batchkv_producer.manage import cancel_retry, forget, input_lines
from batchkv_producer.manage.cancel_retry import Unanswered
from batchkv_producer.manage.input_lines import MissingLines
from batchkv_producer.manage.reconcile import Reconciler
from batchkv_producer.monitor import listing, one_job, remaining, status, workers
from batchkv_producer.monitor.one_job import JobInfo
from batchkv_producer.monitor.open_batches import OpenBatches
from batchkv_producer.monitor.status import BatchStatus
from batchkv_producer.monitor.waiting import wait_for_result, wait_until_done
from batchkv_producer.monitor.workers import WorkerInfo
from batchkv_producer.results import stored_rows
from batchkv_producer.results.bounded import stored_results
from batchkv_producer.results.failures import Failures, read_failures
from batchkv_producer.results.stored_rows import StoredRow
from batchkv_producer.server.memory_use import MemoryUse, read_memory_use
from batchkv_producer.submit import restore, submission
from batchkv_producer.submit.enqueue import DEFAULT_JOB_TIMEOUT_SECONDS, Progress
from batchkv_producer.submit.kept_answers import EarlierBatch, earlier_named
from batchkv_producer.submit.submission import Checked, Identified, Submitted
from batchkv_producer.wire import redis_keys, suspects
from batchkv_producer.wire.adapter import parse_adapter
from batchkv_producer.wire.batch_options import NO_OPTIONS, BatchOptions, Deadline
from batchkv_producer.wire.batch_options import Terms as Terms
from batchkv_producer.wire.job import Result, SamplingParams, decode_result
from batchkv_producer.wire.transitions import Transitions

__all__ = [
    "BatchOptions",
    "BatchStatus",
    "Checked",
    "Client",
    "Deadline",
    "Failures",
    "JobInfo",
    "StoredRow",
    "Submitted",
    "Unanswered",
    "WorkerInfo",
]

PAGE_ROWS = 500
MAX_RECLAIMED = 1_000_000
NO_DEFAULTS = SamplingParams()


class Client:
    """All operations of a producer, over one connection that must return bytes.

    Batch ids may be shortened to a unique prefix of at least 6 digits. An unknown id raises
    NotFoundError. Errors of the server are redis-py's exceptions. ``wait`` and ``results`` with
    ``follow`` survive an outage of up to a minute.
    """

    poll_seconds = 0.1  # between two polls of a batch that is followed

    def __init__(self, connection: Redis) -> None:
        self._connection = connection
        self._reconciler = Reconciler(connection)
        self._open_batches = OpenBatches(connection)

    def submit(
        self,
        source: Given,
        *,
        model: str | None = None,
        defaults: SamplingParams = NO_DEFAULTS,
        job_timeout_seconds: int = DEFAULT_JOB_TIMEOUT_SECONDS,
        name: str | None = None,
        on_progress: Progress | None = None,
        default_model: str | None = None,
        on_identified: Identified | None = None,
        options: BatchOptions = NO_OPTIONS,
        terms: BatchOptions | None = None,
        prompting: Prompting = AUTO,
        earlier: EarlierBatch | None = None,
        adapter: str | None = None,
    ) -> Submitted:
        """Queue a file, or dicts like the objects of its lines. The same input joins its batch.

        ``options``: priority, deadline, dedupe, reuse, how long results stay. A batch that exists
        keeps its own. ``terms`` is the old name of ``options``.

        ``prompting`` says how plain prompts are sent.

        ``default_model`` is used if neither ``model`` nor the lines name one. ``on_identified``
        gets the batch's id and model before anything is changed, and may refuse by raising.
        ``earlier``: a batch whose answers are kept for rows with the same request.

        ``adapter``: the name of an adapter that workers serve with the model. ``NAME=FOLDER`` also
        says where its files are here, so that the batch is computed with those files alone.
        """
        options = options if terms is None else terms
        if adapter is not None:
            options = replace(options, adapter=parse_adapter(adapter))
        return submission.submit(
            self._connection,
            as_source(source),
            model=model,
            defaults=defaults,
            job_timeout_seconds=job_timeout_seconds,
            name=name,
            on_progress=on_progress,
            default_model=default_model,
            on_identified=on_identified,
            options=options,
            prompting=prompting,
            earlier=earlier,
        )

    check = staticmethod(submission.check)  # needs no server

    def status(self, batch_id: str) -> BatchStatus:
        """The status of one batch. Rows past its deadline are ended first."""
        found = status.find_batch(self._connection, batch_id, or_forgotten=True)
        return self._reconciler.reconcile_id(found)

    def list_batches(self, limit: int | None = None) -> list[BatchStatus]:
        """The batches of the server, newest first: all, or the newest ``limit``."""
        return list(itertools.islice(self.each_batch(), limit))

    def each_batch(self, *, in_queue: bool = False) -> Iterator[BatchStatus]:
        """All batches of the server, newest first, one by one, in bounded memory.

        ``in_queue``: as of a gateway, which also has others. Here all batches are in the queue.
        """
        for page in listing.newest_first(self._connection):
            yield from self._reconciler.reconcile_all(page)

    def count_batches(self) -> int:
        """The number of batches on the server."""
        return listing.count_batches(self._connection)

    def open_batches(self, queues: Collection[str]) -> list[BatchStatus]:
        """The batches of these queues that are not done, newest first. Nothing is reconciled."""
        return self._open_batches.find(queues)

    def seconds_left(
        self, queues: Collection[str], found: Sequence[WorkerInfo]
    ) -> Mapping[str, float]:
        """Batch id -> seconds until it is done, for open batches of these queues. ``found``: their
        workers."""
        return remaining.seconds_left(self.open_batches(queues), found) if queues else {}

    def memory_use(self) -> MemoryUse | None:
        """The memory of the server. None if this user may not read it."""
        return read_memory_use(self._connection)

    def workers(self) -> list[WorkerInfo]:
        """All live workers."""
        return workers.read_workers(self._connection)

    def serving(self, queue: str) -> list[WorkerInfo]:
        """The live workers of one queue. Their rows are counted only for workers that are away."""
        return workers.serving_workers(self._connection, queue)

    def count_apart(self, queue: str) -> int:
        """The number of rows that wait to run apart, because a worker died with them."""
        return suspects.count_waiting(self._connection, queue)

    def failures(self, batch: BatchStatus) -> list[Failures]:
        """The failures of a batch by code, the most frequent first."""
        return read_failures(self._connection, batch)

    def job(self, job_id: str) -> JobInfo:
        """The status of one job."""
        return one_job.read_job(self._connection, job_id)

    def result(self, job_id: str, wait_seconds: float = 0) -> Result | None:
        """One job's result, or None if it has none after ``wait_seconds``."""
        batch_id, line = one_job.split_job_id(job_id)
        if self._stored(batch_id, line) is None:
            self._reconciler.reconcile_id(batch_id)
        value = wait_for_result(
            partial(self._stored, batch_id, line), partial(self.job, job_id), wait_seconds
        )
        return None if value is None else decode_result(value)

    def results(
        self,
        batch_id: str,
        *,
        order: Literal["finish", "input"] = "finish",
        follow: bool = False,
        after: int = 0,
        on_status: Callable[[BatchStatus], object] | None = None,
    ) -> Iterator[StoredRow]:
        """Results one by one, those of wrong rows included.

        ``order="finish"`` starts at index ``after`` of the finish order. ``follow`` goes on until
        the batch is done; with ``order="input"`` it waits for each line in turn. ``on_status`` gets
        each status that it reads meanwhile.

        If the batch expires or is deleted meanwhile, NotFoundError is raised in place of the
        remaining rows.
        """
        full_id = self._find(batch_id)

        def reconciled(_: Redis, batch: str) -> BatchStatus:
            found = self._reconciler.reconcile_id(batch)
            if on_status is not None:
                on_status(found)
            return found

        if order == "input":
            rows = stored_rows.in_input_order(
                self._connection, full_id, follow=follow, look=reconciled
            )
        else:
            rows = stored_rows.in_finish_order(
                self._connection, full_id, follow=follow, after=after, look=reconciled
            )
        return stored_rows.none_missing(self._connection, full_id, rows)

    def results_of(
        self, batch_id: str, lines: Sequence[int]
    ) -> Iterator[tuple[int, Result | None]]:
        """(line, its result or None) of each of these lines of a batch, by its full id."""
        for line, value in stored_results(self._connection, batch_id, lines):
            yield line, None if value is None else decode_result(value)

    def wait(
        self,
        batch_id: str,
        *,
        timeout_seconds: float | None = None,
        on_progress: Callable[[BatchStatus], None] | None = None,
    ) -> BatchStatus:
        """Poll until the batch is done or the time is over. Returns the last status."""
        full_id = self._find(batch_id)
        return wait_until_done(
            partial(self._reconciler.reconcile_id, full_id),
            timeout_seconds=timeout_seconds,
            on_progress=on_progress,
        )

    def cancel(self, target: str) -> int:
        """Cancel a batch or one job. Returns the number of canceled rows."""
        if "-" in target:
            return cancel_retry.cancel_job(self._connection, target)
        return cancel_retry.cancel_batch(self._connection, self.status(target))

    def retry(
        self,
        batch_id: str,
        canceled: bool = False,
        *,
        job_timeout_seconds: int | None = None,
        expires: Deadline | None = None,
        source: Given | None = None,
        defaults: SamplingParams | None = None,
    ) -> int:
        """Queue a batch's failed rows again, and with ``canceled`` the canceled ones.

        Returns the number of queued rows. If the batch's deadline is past, ``expires`` must be a
        new one, or ``batch_options.NEVER``. ``source`` is the input of the submit: with it, rows
        whose jobs are no longer in Redis are queued, too.
        """
        return restore.retry_batch(
            self._connection,
            self.status(batch_id),
            None if source is None else as_source(source),
            defaults=defaults,
            canceled=canceled,
            job_timeout_seconds=job_timeout_seconds,
            expires=expires,
        )

    def forget(self, batch_id: str) -> str:
        """Delete a batch from the server, with queued and running rows. Returns its full id."""
        return forget.forget_batch(self._connection, batch_id)

    def unanswered(self, batch_id: str) -> Unanswered:
        """Count a batch's rows without an answer, by the reason."""
        return cancel_retry.count_unanswered(self._connection, self._find(batch_id))

    def named(self, names: Iterable[str]) -> dict[str, BatchStatus | None]:
        """The batches with these ids, or unique prefixes of ids. None: only its name is left."""
        return forget.find_named(self._connection, names)

    def earlier_named(self, wanted: str | None) -> EarlierBatch | None:
        """Find the batch whose answers are kept, by its id or a prefix of it."""
        return earlier_named(self._connection, wanted)

    def is_any_gone(self, batch_id: str, failures: Iterable[Failures]) -> bool:
        """Whether some of these failed rows have no job any more."""
        return restore.is_any_gone(self._connection, batch_id, failures)

    def failed_lines(
        self, batch: BatchStatus, missing: MissingLines, *, canceled: bool = False
    ) -> Iterator[str]:
        """An input line for each failed (or canceled) row. Rows without one add to ``missing``."""
        return input_lines.failed_lines(self._connection, batch, missing, canceled=canceled)

    def job_ids(self, batch_id: str) -> Iterator[str]:
        """The ids of a batch's jobs in input order, those of wrong rows included."""
        batch = self.status(batch_id)
        for start in range(1, batch.last_line + 1, PAGE_ROWS):
            lines = range(start, min(start + PAGE_ROWS, batch.last_line + 1))
            for line in stored_rows.rows_among(self._connection, batch, lines):
                yield redis_keys.job_id(batch.batch_id, line)

    def reclaim(self, queue: str, worker_name: str, *, is_death: bool = True) -> int:
        """Take back all jobs of a worker that has ended. Returns their number.

        If ``is_death``, the rows that it had started are suspects. Give False if it was ended on
        purpose.
        """
        if not worker_name:
            raise UsageError("reclaim needs the name of a worker")
        moves = Transitions(self._connection)
        requeued, failed = moves.reap(queue, worker_name, MAX_RECLAIMED, is_death=is_death)
        return requeued + failed

    def _stored(self, batch_id: str, line: int) -> bytes | None:
        value: Any = self._connection.hget(redis_keys.results(batch_id), str(line))
        return cast("bytes | None", value)

    def _find(self, batch_id: str) -> str:
        return status.find_batch(self._connection, batch_id)
