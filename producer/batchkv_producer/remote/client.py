"""The operations of ``client.Client`` over a gateway. It needs neither Redis nor its password."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import islice
from typing import Any, Literal
from urllib.parse import quote

from batchkv_producer.errors import AwayError, ExpiredError, ServerError, UsageError
from batchkv_producer.intake.given_rows import Given, as_source
from batchkv_producer.intake.prompting import AUTO, Prompting
from batchkv_producer.intake.source import inputs_of
from batchkv_producer.manage.cancel_retry import Unanswered
from batchkv_producer.manage.input_lines import MissingLines
from batchkv_producer.monitor.one_job import JobInfo, split_job_id
from batchkv_producer.monitor.status import BatchStatus
from batchkv_producer.monitor.waiting import wait_for_result, wait_until_done
from batchkv_producer.monitor.workers import WorkerInfo
from batchkv_producer.remote.body import InputBody
from batchkv_producer.remote.decoding import decoded, decoded_list, part
from batchkv_producer.remote.rows import RowReader, is_openai_id, path_of, row_of
from batchkv_producer.remote.terms import Terms
from batchkv_producer.remote.transport import Transport
from batchkv_producer.report.facts import Facts
from batchkv_producer.results.failures import Failures
from batchkv_producer.results.stored_rows import StoredRow
from batchkv_producer.retry import read_with_retry
from batchkv_producer.server.memory_use import MemoryUse
from batchkv_producer.submit.enqueue import DEFAULT_JOB_TIMEOUT_SECONDS, Progress
from batchkv_producer.submit.kept_answers import EarlierBatch
from batchkv_producer.submit.submission import Identified, Submitted, check
from batchkv_producer.wire.adapter import parse_adapter
from batchkv_producer.wire.batch_options import NO_OPTIONS, BatchOptions, Deadline
from batchkv_producer.wire.job import NO_PARAMS, Result, SamplingParams

PAGE_BATCHES = 200
PAGE_LINES = 500
ID_CHARS = 16
MAX_SHOWN_ERRORS = 5


class RemoteClient:
    """A client of one gateway. The methods are those of ``Client``, without ``reclaim``.

    A request is repeated for some seconds while the gateway is away. ``wait`` and ``results`` with
    ``follow`` survive an outage of up to five minutes.
    """

    poll_seconds = 0.5  # between two polls of a batch that is followed

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.out_batch = ""  # of the OUT of `batchkv run`: a submit of another batch is refused

    @property
    def transport(self) -> Transport:
        """Sends the requests."""
        return self._transport

    def submit(
        self,
        source: Given,
        *,
        model: str | None = None,
        defaults: SamplingParams = NO_PARAMS,
        job_timeout_seconds: int = DEFAULT_JOB_TIMEOUT_SECONDS,
        name: str | None = None,
        on_progress: Progress | None = None,
        default_model: str | None = None,
        on_identified: Identified | None = None,
        options: BatchOptions = NO_OPTIONS,
        prompting: Prompting = AUTO,
        earlier: EarlierBatch | None = None,
        adapter: str | None = None,
    ) -> Submitted:
        """Send a file, or dicts like the objects of its lines. The same input joins its batch.

        See ``Client.submit``. ``on_identified`` is called after the rows were queued. There is no
        progress.
        """
        if adapter is not None:
            options = replace(options, adapter=parse_adapter(adapter))
        inputs = inputs_of(as_source(source))
        body = InputBody.of(inputs)
        terms = Terms(
            model=model,
            default_model=default_model,
            name=name or inputs.name,
            read_as=inputs.read_as,
            prompting=prompting,
            defaults=defaults,
            job_timeout_seconds=job_timeout_seconds,
            options=options,
            source_batch=earlier.batch_id if earlier else None,
            out_batch=self.out_batch or None,
            files=body.parts,
        )
        try:
            answer = self._transport.send(
                "POST", "batches", None, terms.headers(), body, may_repeat=not options.fresh
            )
        except AwayError as fault:
            if not options.fresh:
                raise
            raise ServerError(
                f"{fault}. The rows may be queued: see `batchkv list` before you submit them again "
                "with --fresh"
            ) from fault
        submitted = decoded(Submitted, part(answer, "submitted", dict))
        if earlier is not None:
            _copy(decoded(EarlierBatch, part(answer, "earlier", dict)), earlier)
        if on_identified is not None:
            on_identified(submitted.batch_id, submitted.model, submitted.relatives)
        return submitted

    check = staticmethod(check)  # needs no gateway

    def status(self, batch_id: str) -> BatchStatus:
        """The status of one batch. Rows past its deadline are ended first."""
        return decoded(BatchStatus, self._transport.get(path_of(batch_id)))

    def list_batches(self, limit: int | None = None) -> list[BatchStatus]:
        """The batches of this key, newest first: all, or the newest ``limit``."""
        return list(islice(self._each_batch(limit), limit))

    def each_batch(self, *, in_queue: bool = False) -> Iterator[BatchStatus]:
        """All batches of this key, newest first, one by one.

        Those of OpenAI's API that have ended are in files; ``in_queue``: without these.
        """
        return self._each_batch(in_queue=in_queue)

    def _each_batch(
        self, limit: int | None = None, *, in_queue: bool = False
    ) -> Iterator[BatchStatus]:
        """``limit``: no more are needed."""
        after, size = "", min(limit or PAGE_BATCHES, PAGE_BATCHES)
        while True:
            page = self._transport.get("batches", limit=size, after=after)
            for each in part(page, "data", list):
                if not in_queue or part(each, "in_queue", bool):
                    yield decoded(BatchStatus, each)
            if not part(page, "has_more", bool):
                return
            after = part(page, "next", str)

    def count_batches(self) -> int:
        """The number of this key's batches."""
        return part(self._transport.get("batches", limit=1, count=1), "total", int)

    def seconds_left(
        self, queues: Collection[str], found: Sequence[WorkerInfo]
    ) -> Mapping[str, float]:
        """The seconds until batches are done, where they are known. The gateway computes them."""
        if not queues:
            return {}
        left = part(self._transport.get("left"), "data", dict)
        return {name: float(seconds) for name, seconds in left.items()}

    def workers(self) -> list[WorkerInfo]:
        """All live workers."""
        return self._workers("")

    def serving(self, queue: str) -> list[WorkerInfo]:
        """The live workers of one queue."""
        return self._workers(queue)

    def _workers(self, queue: str) -> list[WorkerInfo]:
        answer = self._transport.get("workers", queue=queue or None)
        return decoded_list(WorkerInfo, part(answer, "data", list))

    def count_apart(self, queue: str) -> int:
        """The number of rows that wait to run apart, because a worker died with them."""
        return part(self._transport.get("workers", queue=queue), "apart", int)

    def memory_use(self) -> MemoryUse | None:
        """The memory of the gateway's Redis. None if this key may not see it."""
        answer = self._transport.get("server").get("memory")
        return None if answer is None else decoded(MemoryUse, answer)

    def failures(self, batch: BatchStatus) -> list[Failures]:
        """The failures of a batch by code, the most frequent first."""
        if not batch.failed:
            return []
        answer = self._transport.get(path_of(batch.batch_id, "failures"))
        return decoded_list(Failures, part(answer, "data", list))

    def job(self, job_id: str) -> JobInfo:
        """The status of one job."""
        batch_id, line = split_job_id(job_id)
        return decoded(JobInfo, self._transport.get(path_of(batch_id, f"jobs/{line}")))

    def result(self, job_id: str, wait_seconds: float = 0) -> Result | None:
        """One job's result, or None if it has none after ``wait_seconds``."""
        batch_id, line = split_job_id(job_id)

        def read() -> Result | None:
            ((_, found),) = self.results_of(batch_id, [line])
            return found

        return wait_for_result(read, partial(self.job, job_id), wait_seconds)

    def results(
        self,
        batch_id: str,
        *,
        order: Literal["finish", "input"] = "finish",
        follow: bool = False,
        after: int = 0,
    ) -> Iterator[StoredRow]:
        """Results one by one, those of wrong rows included. See ``Client.results``.

        After a cut it goes on behind the last row that it has. With ``order="input"`` and
        ``follow`` it waits until the batch is done.
        """
        if order == "input" and follow:
            self.wait(batch_id)
            follow = False
        full_id = batch_id if len(batch_id) == ID_CHARS else self.status(batch_id).batch_id
        if is_openai_id(full_id):
            self._check_queued(full_id)
        return RowReader(self._transport, full_id, order, after, is_followed=follow).each()

    def results_of(
        self, batch_id: str, lines: Sequence[int]
    ) -> Iterator[tuple[int, Result | None]]:
        """(line, its result or None) of each line."""
        for start in range(0, len(lines), PAGE_LINES):
            wanted = lines[start : start + PAGE_LINES]
            found = {row.line: row.result for row in self._rows_of(batch_id, wanted)}
            yield from ((line, found.get(line)) for line in wanted)

    def _rows_of(self, batch_id: str, lines: Sequence[int]) -> list[StoredRow]:
        def read() -> list[StoredRow]:
            path, names = path_of(batch_id, "results"), ",".join(map(str, lines))
            found = self._transport.lines(path, form="stored", lines=names)
            return [row_of(batch_id, line) for line in found]

        return read_with_retry(read)

    def wait(
        self,
        batch_id: str,
        *,
        timeout_seconds: float | None = None,
        on_progress: Callable[[BatchStatus], None] | None = None,
    ) -> BatchStatus:
        """Poll until the batch is done or the time is over. Returns the last status."""
        full_id = batch_id if is_openai_id(batch_id) else self.status(batch_id).batch_id
        found = wait_until_done(
            partial(self.status, full_id), timeout_seconds=timeout_seconds, on_progress=on_progress
        )
        if found.is_done and not found.total:
            self._check_queued(full_id)
        return found

    def _check_queued(self, batch_id: str) -> None:
        """Raise UsageError for a batch of OpenAI's API of which nothing was queued."""
        answer = self._transport.get(path_of(batch_id))
        if answer.get("openai_status") != "failed":
            return
        errors = answer.get("openai_errors") or []
        shown = [_in_words(each) for each in errors[:MAX_SHOWN_ERRORS] if isinstance(each, dict)]
        more = len(errors) - len(shown)
        raise UsageError(
            "; ".join(["nothing was queued", *shown, *([f"and {more:,} more"] if more > 0 else [])])
            + ". Correct the file and make a new batch"
        )

    def cancel(self, target: str) -> int:
        """Cancel a batch or one job. Returns the number of canceled rows."""
        batch_id, line = split_job_id(target) if "-" in target else (target, None)
        answer = self._transport.send("POST", path_of(batch_id, "cancel"), {"line": line})
        return part(answer, "canceled", int)

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

        Returns the number of queued rows. See ``Client.retry``.
        """
        inputs = None if source is None else inputs_of(as_source(source))
        body = None if inputs is None else InputBody.of(inputs)
        if job_timeout_seconds is not None and job_timeout_seconds < 1:
            raise UsageError(
                f"the job timeout must be at least 1 second, got {job_timeout_seconds}"
            )
        terms = Terms(
            read_as=inputs.read_as if inputs else None,
            name=inputs.name if inputs else None,
            defaults=defaults or NO_PARAMS,
            job_timeout_seconds=job_timeout_seconds,
            options=BatchOptions(expires=expires),
            files=body.parts if body else (),
            canceled=canceled,
        )
        path = path_of(batch_id, "retry")
        answer = self._transport.send("POST", path, None, terms.headers(), body)
        num = part(answer, "queued", int)
        if not num and is_openai_id(batch_id):
            self._check_queued(batch_id)
        if answer.get("openai_id"):
            self._transport.note(f"these rows are a new batch, {answer['openai_id']}")
        return num

    def forget(self, batch_id: str) -> str:
        """Delete a batch, with queued and running rows. Returns its full id."""
        return part(self._transport.send("DELETE", path_of(batch_id)), "batch_id", str)

    def facts(self, batch_id: str) -> Facts:
        """The facts of a batch's report."""
        answer = self._transport.get(path_of(batch_id), facts=1)
        return decoded(Facts, part(answer, "report", dict))

    def drain(self, name: str) -> None:
        """Let a worker end its rows and take no more. For an admin's key."""
        self._transport.send("POST", f"workers/{quote(name, safe='')}/drain")

    def resume(self, name: str) -> None:
        """Let a worker take rows again. For an admin's key."""
        self._transport.send("POST", f"workers/{quote(name, safe='')}/resume")

    def unanswered(self, batch_id: str) -> Unanswered:
        """Count a batch's rows without an answer, by the reason."""
        return decoded(Unanswered, self._transport.get(path_of(batch_id, "unanswered")))

    def failed_lines(
        self, batch: BatchStatus, missing: MissingLines, *, canceled: bool = False
    ) -> Iterator[str]:
        """An input line for each failed (or canceled) row. Rows without one add to ``missing``.

        Raises AwayError if the answer is cut off.
        """
        path = path_of(batch.batch_id, "failed")
        last = b""
        for line in self._transport.lines(path, canceled=int(canceled)):
            if last:
                yield last.decode("utf-8", "replace")
            last = line
        counts = self._transport.parsed(last)
        missing.num_wrong += part(counts, "num_wrong", int)
        missing.num_gone += part(counts, "num_gone", int)

    def job_ids(self, batch_id: str) -> Iterator[str]:
        """The ids of a batch's jobs in input order, those of wrong rows included."""
        for line in self._transport.lines(path_of(batch_id, "jobs")):
            yield line.decode("ascii", "replace")

    def named(self, names: Iterable[str]) -> dict[str, BatchStatus | None]:
        """The batches with these ids, or unique prefixes of ids. None: only its name is left."""
        found: dict[str, BatchStatus | None] = {}
        for name in names:
            try:
                status = self.status(name)
                found[status.batch_id] = status
            except ExpiredError:
                found[name] = None
        return found

    def earlier_named(self, wanted: str | None) -> EarlierBatch | None:
        """Find the batch whose answers are kept, by its id or a prefix of it."""
        return EarlierBatch(self.status(wanted).batch_id) if wanted else None

    def is_any_gone(self, batch_id: str, failures: Iterable[Failures]) -> bool:
        """Whether some failed row has no job any more."""
        return any(failures) and self.unanswered(batch_id).expired > 0


def _in_words(error: dict[str, Any]) -> str:
    """A fault of a batch's input, as OpenAI's API names it."""
    line = f"line {error['line']}: " if error.get("line") else ""
    return f"{line}{error.get('code')}: {error.get('message')}"


def _copy(found: EarlierBatch, into: EarlierBatch) -> None:
    """What the gateway found in the earlier batch."""
    for field in fields(found):
        setattr(into, field.name, getattr(found, field.name))
