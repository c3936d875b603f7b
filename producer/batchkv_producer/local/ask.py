"""``batchkv ask``: answers one prompt and leaves nothing on the server.

A question is a live row (``live_ask``): it runs before all rows of batches, and its text is printed
as it is made. Where workers or the hub are of a version without live rows, it is a batch of one row
with high priority. That batch is deleted as soon as it has an answer, or when the user stops the
command. If this process is killed, the row is canceled, and the batch expires.
"""

from __future__ import annotations

import io
import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial

from redis import Redis
from redis.exceptions import RedisError

from batchkv_producer.client import Client, StoredRow
from batchkv_producer.errors import BatchkvError, UsageError
from batchkv_producer.intake.formats import MAX_LINE_BYTES
from batchkv_producer.intake.prompting import AUTO, Prompting
from batchkv_producer.intake.source import Inputs, Piece
from batchkv_producer.local.follow import snapshot_of
from batchkv_producer.local.live_ask import DesertedError, LiveQuestion, NoLaneError, OnPiece
from batchkv_producer.local.local_workers import (
    WORKER_COMMAND,
    LocalWorkers,
    WorkerPlan,
)
from batchkv_producer.local.own_adapter import OwnModel, own_model
from batchkv_producer.local.run_support import Outage, give_up, one_try, reclaim, tidied_home
from batchkv_producer.local.signals import Interrupted, noted_signals
from batchkv_producer.local.worker_checks import WAY_OUT_OF_ASK, check_model_folder, check_rights
from batchkv_producer.monitor.delays import Delays
from batchkv_producer.monitor.workers import ASK_NAME_PREFIX, WorkerInfo
from batchkv_producer.order.planner import with_defaults
from batchkv_producer.progress import Reporter
from batchkv_producer.retry import called_during_outages, read_with_retry
from batchkv_producer.settings_table import BY_NAME
from batchkv_producer.submit import adapter_folders, fingerprint
from batchkv_producer.submit.enqueue import DEFAULT_JOB_TIMEOUT_SECONDS
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.adapter import Adapter, with_adapter
from batchkv_producer.wire.batch_options import BatchOptions, Deadline
from batchkv_producer.wire.job import Request, SamplingParams

TURN_SECONDS = 0.05
# The deadlines matter only if the process is killed; else it deletes the batch itself.
OPTIONS = BatchOptions(priority="high", expires=Deadline(in_seconds=86400), keep_seconds=3600)


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, its model, and the options of generation."""

    prompt: str
    model: str
    defaults: SamplingParams = SamplingParams()  # noqa: RUF009  (it is frozen)
    prompting: Prompting = AUTO
    job_timeout_seconds: int = DEFAULT_JOB_TIMEOUT_SECONDS
    adapter: Adapter | None = None

    @property
    def served(self) -> str:
        """The name under which workers serve the model, with its adapter."""
        return with_adapter(self.model, self.adapter.name if self.adapter else "")

    def request(self) -> Request:
        """The row, with all that was asked for it. Raises UsageError."""
        self.prompting.check()
        if self.prompting.no_thinking and self.defaults.thinking_budget is not None:
            raise UsageError("--no-thinking and --thinking-budget exclude each other")
        custom_id = f"ask-{secrets.token_hex(8)}"
        row = Request(custom_id, "completion", prompt=self.prompt, style="auto")
        return self.prompting.apply(replace(row, params=with_defaults(self.defaults)(row.params)))

    def source(self) -> Inputs:
        """The input of one row, with an id that no other question has. Raises UsageError."""
        if not self.prompt.strip():
            raise UsageError("the prompt is empty")
        try:
            self.prompt.encode("utf-8")
        except UnicodeEncodeError:
            raise UsageError("the prompt is not UTF-8") from None
        row = {"custom_id": f"ask-{secrets.token_hex(8)}", "prompt": self.prompt}
        line = json.dumps(row, ensure_ascii=False).encode("utf-8") + b"\n"
        if len(line) > MAX_LINE_BYTES:
            raise UsageError(f"the prompt is longer than {MAX_LINE_BYTES:,} bytes")
        return Inputs((Piece(io.BytesIO(line), "ask", start=0),), "jsonl")


def ask(
    client: Client,
    connection: Redis,
    url: str,
    question: Question,
    reporter: Reporter,
    *,
    revive: Callable[[], object] | None = None,
    worker_command: Sequence[str] = WORKER_COMMAND,
    on_piece: OnPiece = lambda _: None,
) -> StoredRow:
    """The row with its answer or its error. ``on_piece`` gets the text as it is made.

    If no worker serves the model, or none any more, one is started here for this question. Raises
    as ``run`` does.
    """
    what = client, connection, url, question, reporter
    while True:
        try:
            return _ask(*what, revive=revive, worker_command=worker_command, on_piece=on_piece)
        except DesertedError:
            reporter.note(f"the worker that served {question.served} is gone or paused")


def _ask(
    client: Client,
    connection: Redis,
    url: str,
    question: Question,
    reporter: Reporter,
    *,
    revive: Callable[[], object] | None,
    worker_command: Sequence[str],
    on_piece: OnPiece,
) -> StoredRow:
    source, request = question.source(), question.request()
    served = question.served
    home = tidied_home(connection)  # a dead worker of this machine serves nothing
    num_local = 0 if _serves(question, client.serving(redis_keys.queue_name(served))) else 1
    with adapter_folders.given(question.adapter):
        weights = fingerprint.of_model(served)
    own = own_model(served, question.adapter) if num_local else OwnModel(served)
    if num_local:
        check_model_folder(own.model)
        check_rights(connection, url, served, WAY_OUT_OF_ASK)
    plan = WorkerPlan(
        model=own.model,
        url=url,
        logs=home.logs,
        name_prefix=ASK_NAME_PREFIX,
        num_workers=num_local,
        arguments=own.arguments,
        command=tuple(worker_command),
        variables=((BY_NAME["polite"].variable, "off"),),  # somebody waits for the answer
    )
    if num_local:
        reporter.note(f"nobody serves {served}: a worker is started for this question")
    workers = LocalWorkers(plan, partial(reclaim, client, own.queues), reporter.note)
    with one_try(connection):
        outage = Outage(reporter.note, revive)
        with _ended(_Waiting(workers, outage)) as waiting:
            live = LiveQuestion(
                *(connection, request, served, weights or ""),
                *(question.job_timeout_seconds, on_piece, reporter),
                is_served=None if num_local else partial(_serves, question),
            )
            try:
                return waiting.wait(lambda: live.look(TURN_SECONDS), live.close)
            except NoLaneError:
                batch = _Batch(client, question, source, reporter, num_local)
                return waiting.wait(batch.look, batch.forget)


class _Batch:
    """The question as a batch of one row, for workers of versions without live rows."""

    def __init__(
        self,
        client: Client,
        question: Question,
        source: Inputs,
        reporter: Reporter,
        num_local: int,
    ) -> None:
        self._client = client
        self._reporter = reporter
        self._delays = Delays(client.serving, reporter.note, num_local)
        with adapter_folders.given(question.adapter):
            self._batch_id = client.submit(
                source,
                model=question.model,
                defaults=question.defaults,
                job_timeout_seconds=question.job_timeout_seconds,
                name="ask",
                options=replace(OPTIONS, adapter=question.adapter),
                prompting=question.prompting,
            ).batch_id

    def look(self) -> StoredRow | None:
        """The row, once it has ended."""
        status = self._client.status(self._batch_id)
        self._reporter.update(snapshot_of(status, self._delays.look(status)))
        if not status.is_done:
            time.sleep(TURN_SECONDS)
            return None
        row = read_with_retry(lambda: next(self._client.results(self._batch_id), None))
        if row is None:
            raise BatchkvError(
                "the question was deleted from the server while it ran (`batchkv forget`): "
                "run the same command again"
            )
        return row

    def forget(self) -> None:
        """Delete the batch. If the server is away then, the batch expires."""
        with suppress(BatchkvError, RedisError):
            self._client.forget(self._batch_id)


def _serves(question: Question, serving: Sequence[WorkerInfo]) -> bool:
    """``_is_served`` for the model of a question, with its adapter."""
    with adapter_folders.given(question.adapter):
        return _is_served(question.served, serving)


def _is_served(model: str, serving: Sequence[WorkerInfo]) -> bool:
    """Whether a worker with these weights serves the model and is not away."""
    own = fingerprint.of_model(model)
    return any(
        not (own and worker.fingerprint and own != worker.fingerprint)
        for worker in serving
        if not (worker.is_away or worker.is_resting)
    )


class _Waiting:
    """The loop: looks for the answer, supervises our own worker, checks for signals."""

    def __init__(self, workers: LocalWorkers, outage: Outage) -> None:
        self._workers = workers
        self._outage = outage
        self._caught: list[int] = []

    def wait(self, look: Callable[[], StoredRow | None], forget: Callable[[], object]) -> StoredRow:
        """The row, once ``look`` returns it. Then, or after a fault or a signal, ``forget`` is
        called. Raises Interrupted after a signal."""

        def wait_for_server() -> None:
            self._outage.begin()
            self._check_signals()

        try:
            with called_during_outages(wait_for_server):
                while True:
                    row = read_with_retry(look)
                    self._outage.end()
                    if row is not None:
                        return row
                    self._check_signals()
                    self._workers.supervise(0)
        finally:
            if not self._outage.is_on:
                with called_during_outages(give_up):
                    forget()

    def _check_signals(self) -> None:
        if self._caught:
            raise Interrupted(
                self._caught[0], "interrupted; the question is deleted from the server"
            )

    def run(self) -> Iterator[_Waiting]:
        """Note signals, and at the end stop our own worker, which has nothing left to finish."""
        with noted_signals() as self._caught:
            try:
                yield self
            finally:
                num_handled = len(self._caught)
                with called_during_outages(give_up):
                    if self._outage.is_on:
                        self._workers.abandon()
                    else:
                        self._workers.stop(lambda: len(self._caught) > num_handled)


@contextmanager
def _ended(waiting: _Waiting) -> Iterator[_Waiting]:
    yield from waiting.run()
