"""The operations that commands use on batches: by Redis (``client``), or by a gateway (``remote``).

The docstrings are those of ``client.Client``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal, Protocol

from batchkv_producer.intake.given_rows import Given
from batchkv_producer.intake.prompting import Prompting
from batchkv_producer.manage.cancel_retry import Unanswered
from batchkv_producer.manage.input_lines import MissingLines
from batchkv_producer.monitor.one_job import JobInfo
from batchkv_producer.monitor.status import BatchStatus
from batchkv_producer.monitor.workers import WorkerInfo
from batchkv_producer.results.failures import Failures
from batchkv_producer.results.stored_rows import StoredRow
from batchkv_producer.server.memory_use import MemoryUse
from batchkv_producer.submit.enqueue import Progress
from batchkv_producer.submit.kept_answers import EarlierBatch
from batchkv_producer.submit.submission import Identified, Submitted
from batchkv_producer.wire.batch_options import BatchOptions, Deadline
from batchkv_producer.wire.job import Result, SamplingParams

__all__ = ["BatchClient", "BatchStatus"]


class BatchClient(Protocol):
    """A client of batches. See ``client.Client``."""

    poll_seconds: float

    def submit(
        self,
        source: Given,
        *,
        model: str | None = None,
        defaults: SamplingParams = ...,
        job_timeout_seconds: int = ...,
        name: str | None = None,
        on_progress: Progress | None = None,
        default_model: str | None = None,
        on_identified: Identified | None = None,
        options: BatchOptions = ...,
        prompting: Prompting = ...,
        earlier: EarlierBatch | None = None,
        adapter: str | None = None,
    ) -> Submitted: ...

    def status(self, batch_id: str) -> BatchStatus: ...

    def list_batches(self, limit: int | None = None) -> list[BatchStatus]: ...

    def each_batch(self, *, in_queue: bool = False) -> Iterator[BatchStatus]: ...

    def count_batches(self) -> int: ...

    def seconds_left(
        self, queues: Collection[str], found: Sequence[WorkerInfo]
    ) -> Mapping[str, float]: ...

    def workers(self) -> list[WorkerInfo]: ...

    def serving(self, queue: str) -> list[WorkerInfo]: ...

    def count_apart(self, queue: str) -> int: ...

    def memory_use(self) -> MemoryUse | None: ...

    def failures(self, batch: BatchStatus) -> list[Failures]: ...

    def job(self, job_id: str) -> JobInfo: ...

    def result(self, job_id: str, wait_seconds: float = 0) -> Result | None: ...

    def results(
        self,
        batch_id: str,
        *,
        order: Literal["finish", "input"] = "finish",
        follow: bool = False,
        after: int = 0,
    ) -> Iterator[StoredRow]: ...

    def results_of(
        self, batch_id: str, lines: Sequence[int]
    ) -> Iterator[tuple[int, Result | None]]: ...

    def wait(
        self,
        batch_id: str,
        *,
        timeout_seconds: float | None = None,
        on_progress: Callable[[BatchStatus], None] | None = None,
    ) -> BatchStatus: ...

    def cancel(self, target: str) -> int: ...

    def retry(
        self,
        batch_id: str,
        canceled: bool = False,
        *,
        job_timeout_seconds: int | None = None,
        expires: Deadline | None = None,
        source: Given | None = None,
        defaults: SamplingParams | None = None,
    ) -> int: ...

    def forget(self, batch_id: str) -> str: ...

    def unanswered(self, batch_id: str) -> Unanswered: ...

    def failed_lines(
        self, batch: BatchStatus, missing: MissingLines, *, canceled: bool = False
    ) -> Iterator[str]: ...

    def job_ids(self, batch_id: str) -> Iterator[str]: ...

    def named(self, names: Iterable[str]) -> dict[str, BatchStatus | None]: ...

    def earlier_named(self, wanted: str | None) -> EarlierBatch | None: ...

    def is_any_gone(self, batch_id: str, failures: Iterable[Failures]) -> bool: ...
