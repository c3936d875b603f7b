"""``batchkv ask``: answers one prompt and leaves nothing on the server.

A question is a batch of one row with an id of its own, so the same question is computed again each
time. It runs before all other rows of the model. The batch is deleted as soon as it has an answer,
or when the user stops the command. If this process is killed, the batch expires.
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

from batchkv_producer.client import Client, StoredRow, Submitted
from batchkv_producer.errors import BatchkvError, UsageError
from batchkv_producer.intake.formats import MAX_LINE_BYTES
from batchkv_producer.intake.prompting import AUTO, Prompting
from batchkv_producer.intake.source import Inputs, Piece
from batchkv_producer.local.follow import snapshot_of
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
from batchkv_producer.progress import Reporter
from batchkv_producer.retry import called_during_outages, read_with_retry
from batchkv_producer.settings_table import BY_NAME
from batchkv_producer.submit import adapter_folders, fingerprint
from batchkv_producer.submit.enqueue import DEFAULT_JOB_TIMEOUT_SECONDS
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.adapter import Adapter, with_adapter
from batchkv_producer.wire.batch_options import BatchOptions, Deadline
from batchkv_producer.wire.job import SamplingParams

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
) -> StoredRow:
    """The row with its answer or its error. Afterwards its batch is gone from the server.

    If no worker serves the model, one is started here for this question. Raises as ``run`` does.
    """
    source = question.source()
    served = question.served
    with adapter_folders.given(question.adapter):
        is_served = _is_served(served, client.serving(redis_keys.queue_name(served)))
    num_local = 0 if is_served else 1
    own = own_model(served, question.adapter) if num_local else OwnModel(served)
    if num_local:
        check_model_folder(own.model)
        check_rights(connection, url, served, WAY_OUT_OF_ASK)
    submitted = client.submit(
        source,
        model=question.model,
        defaults=question.defaults,
        job_timeout_seconds=question.job_timeout_seconds,
        name="ask",
        options=replace(OPTIONS, adapter=question.adapter),
        prompting=question.prompting,
    )
    with _forget_at_end(client, submitted):
        plan = WorkerPlan(
            model=own.model,
            url=url,
            logs=tidied_home(connection).logs,
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
            waiting = _Waiting(client, submitted, workers, reporter, num_local)
            return waiting.wait(Outage(reporter.note, revive))


def _is_served(model: str, serving: Sequence[WorkerInfo]) -> bool:
    """Whether a worker with these weights serves the model and is not away."""
    own = fingerprint.of_model(model)
    return any(
        not (own and worker.fingerprint and own != worker.fingerprint)
        for worker in serving
        if not (worker.is_away or worker.is_paused)
    )


@contextmanager
def _forget_at_end(client: Client, submitted: Submitted) -> Iterator[None]:
    """Delete the batch at the end. If the server is away then, the batch expires."""
    try:
        yield
    finally:
        with suppress(BatchkvError, RedisError):
            client.forget(submitted.batch_id)


class _Waiting:
    """The loop: reads the batch's status, supervises our own worker, checks for signals."""

    def __init__(
        self,
        client: Client,
        submitted: Submitted,
        workers: LocalWorkers,
        reporter: Reporter,
        num_local: int,
    ) -> None:
        self._client = client
        self._batch_id = submitted.batch_id
        self._workers = workers
        self._reporter = reporter
        self._delays = Delays(client.serving, reporter.note, num_local)

    def wait(self, outage: Outage) -> StoredRow:
        """The row, once it has ended. Raises Interrupted after a signal."""
        with noted_signals() as caught:

            def wait_for_server() -> None:
                outage.begin()
                self._check_signals(caught)

            try:
                with called_during_outages(wait_for_server):
                    return self._loop(caught, outage)
            finally:
                self._end(outage, caught)

    def _loop(self, caught: list[int], outage: Outage) -> StoredRow:
        while True:
            status = read_with_retry(partial(self._client.status, self._batch_id))
            outage.end()
            self._reporter.update(snapshot_of(status, self._delays.look(status)))
            if status.is_done:
                row = read_with_retry(lambda: next(self._client.results(self._batch_id), None))
                if row is None:
                    raise BatchkvError(
                        "the question was deleted from the server while it ran (`batchkv forget`): "
                        "run the same command again"
                    )
                return row
            self._check_signals(caught)
            self._workers.supervise(status.num_ended)
            time.sleep(TURN_SECONDS)

    def _check_signals(self, caught: list[int]) -> None:
        if caught:
            raise Interrupted(caught[0], "interrupted; the question is deleted from the server")

    def _end(self, outage: Outage, caught: list[int]) -> None:
        """Delete the batch, then stop our own worker, which has nothing left to finish then."""
        num_handled = len(caught)
        with called_during_outages(give_up):
            if outage.is_on:
                self._workers.abandon()
                return
            with suppress(BatchkvError, RedisError):
                self._client.forget(self._batch_id)
            self._workers.stop(lambda: len(caught) > num_handled)
