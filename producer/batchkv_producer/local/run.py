"""``batchkv run``: submits a file, runs workers here, appends results to OUT as rows end.

Everything that must survive is in Redis (the batch) or in OUT (written results). Every step can be
repeated: a submit joins an existing batch, and OUT has each id once. So the same command goes on
after a crash, a kill or a Ctrl-C.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from redis import Redis
from redis.exceptions import RedisError

from batchkv_producer.client import BatchStatus, Client, Submitted
from batchkv_producer.errors import (
    BatchkvError,
    ExpiredError,
    FullHomeError,
    NotFoundError,
    UsageError,
)
from batchkv_producer.intake.expected import Expected
from batchkv_producer.intake.prompting import AUTO, Prompting
from batchkv_producer.intake.source import Source
from batchkv_producer.interface import BatchClient
from batchkv_producer.local.beginning import first_line, note_what_stays, with_own_workers
from batchkv_producer.local.follow import Follower, snapshot_of, stale_rows
from batchkv_producer.local.local_workers import (
    WORKER_COMMAND,
    LocalWorkers,
    RefusedWorkerError,
    WorkerError,
    WorkerPlan,
)
from batchkv_producer.local.mended import earlier_of
from batchkv_producer.local.own_adapter import OwnModel, own_model
from batchkv_producer.local.run_support import (
    STOPPING,
    Outage,
    give_up,
    one_try,
    reclaim,
    tidied_home,
)
from batchkv_producer.local.signals import Interrupted as Interrupted
from batchkv_producer.local.signals import noted_signals
from batchkv_producer.local.worker_checks import (
    check_logs,
    check_model_folder,
    check_model_name,
    check_rights,
)
from batchkv_producer.monitor.delays import Delays
from batchkv_producer.monitor.workers import local_name_prefix
from batchkv_producer.progress import Reporter, Snapshot, duration, rows
from batchkv_producer.results import target
from batchkv_producer.results.aside import holds_other
from batchkv_producer.retry import called_during_outages, read_with_retry
from batchkv_producer.server.connection import refused_writes
from batchkv_producer.server.home import home_from_environment
from batchkv_producer.submit.enqueue import DEFAULT_JOB_TIMEOUT_SECONDS, Progress
from batchkv_producer.submit.kept_answers import EarlierBatch
from batchkv_producer.submit.submission import Identified
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.batch_options import NO_OPTIONS, BatchOptions
from batchkv_producer.wire.job import SamplingParams
from batchkv_producer.wire.maker import NOBODY


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The arguments of ``batchkv run``. ``worker_arguments`` are passed on unchanged.

    ``out`` may be ``target.STDOUT``. The source is read twice.
    """

    source: Source
    out: Path
    model: str | None = None
    default_model: str | None = None
    defaults: SamplingParams = field(default_factory=SamplingParams)
    num_workers: int = 1
    worker_arguments: tuple[str, ...] = ()
    trace: Path | None = None  # of the first worker; see WorkerPlan
    job_timeout_seconds: int | None = None
    batch_options: BatchOptions = NO_OPTIONS
    prompting: Prompting = AUTO


@dataclass(frozen=True, slots=True)
class RunReport:
    """The end of a run. Tokens and seconds are of this run, not of earlier ones."""

    status: BatchStatus
    out: Path
    completion_tokens: int
    seconds: float
    num_expected: int
    num_right: int
    num_wrong: int = 0  # rows that were wrong in the input

    def summary(self) -> str:
        """The last line of ``batchkv run``."""
        parts = [self.status.reconciliation()]
        parts.append(
            f"{self.status.prompt_tokens:,} prompt tokens ({self.status.cached_tokens:,} cached)"
        )
        tokens = f"{self.status.completion_tokens:,} generated"
        if self.completion_tokens and self.seconds > 0:
            rate = f"{self.completion_tokens / self.seconds:,.0f} tok/s"
            if self.completion_tokens != self.status.completion_tokens:
                tokens += f", {self.completion_tokens:,} of them now"
            tokens += f" in {duration(self.seconds)}: {rate}, the start included"
        parts.append(tokens)
        if self.num_expected:
            parts.append(f"answers right: {self.num_right} of {self.num_expected}")
        return ", ".join(parts)


def run(
    client: Client,
    connection: Redis,
    url: str,
    options: RunOptions,
    reporter: Reporter,
    *,
    revive: Callable[[], object] | None = None,
    worker_command: Sequence[str] = WORKER_COMMAND,
) -> RunReport:
    """Run a file to its end. ``url`` is the server of ``connection``; the workers get it.

    ``revive`` starts the server again when it is gone. Without it, the run waits for the server.

    Raises UsageError before anything was changed if input, settings or OUT cannot be used. Raises
    RefusedWorkerError, OutputError, WorkerError and Interrupted later; then the same call goes on.
    """
    target.check_target(options.out, options.source)
    expected = Expected.read(options.source)
    if options.num_workers:
        known = with_own_workers(options.batch_options, options.worker_arguments)
        options = replace(options, batch_options=known)
    earlier = _earlier(connection, options.out)
    submitted = submit_input(
        client,
        options,
        partial(_refuse_early, options, connection, url, earlier, worker_command),
        earlier,
        lambda done, total: reporter.update(Snapshot(total, is_queuing=True)),
    )
    batch_id = submitted.batch_id
    reporter.note(first_line(client, submitted, target.shown(options.out)))
    timeout = options.job_timeout_seconds
    note_what_stays(client, submitted, earlier, options.out, timeout, reporter.note)
    own = OwnModel(submitted.model)  # without workers here nobody asks for its adapter
    if options.num_workers:
        own = own_model(submitted.model, options.batch_options.adapter)
    plan = WorkerPlan(
        model=own.model,
        url=url,
        logs=tidied_home(connection).logs,
        name_prefix=local_name_prefix(batch_id),
        num_workers=options.num_workers,
        arguments=(*options.worker_arguments, *own.arguments),
        trace=options.trace,
        command=tuple(worker_command),
    )
    workers = LocalWorkers(plan, partial(reclaim, client, own.queues), reporter.note)
    stale = stale_rows(client, batch_id)
    with target.open_results(options.out, batch_id, stale) as results:
        follower = Follower(client, batch_id, results, expected)
        with one_try(connection):
            delays = _delays(client, connection, url, reporter, plan)
            outage = Outage(reporter.note, revive)
            work = RunLoop(client, batch_id, workers, follower, reporter, delays, outage)
            work.is_fresh = options.batch_options.fresh
            work.submit_again = partial(submit_again, client, options, submitted.batch_id, earlier)
            report = work.run_until_done()
        follower.refresh(stale)
    return replace(report, num_wrong=submitted.num_bad)


def _earlier(connection: Redis, out: Path) -> EarlierBatch | None:
    if out == target.STDOUT:
        return None
    return earlier_of(lambda name: bool(connection.exists(redis_keys.batch(name))), out)


def submit_again(
    client: BatchClient, options: RunOptions, batch_id: str, earlier: EarlierBatch | None
) -> None:
    """Queue the rows that the server has lost. Raises UsageError if the input has changed."""

    def check(found: str, model: str, relatives: frozenset[str]) -> None:
        if found != batch_id:
            raise UsageError(
                f"the server has lost rows of batch {batch_id}, and the input has changed since it "
                "was submitted: restore the input and run the same command again"
            )

    again = replace(options, batch_options=replace(options.batch_options, fresh=False))
    submit_input(client, again, check, EarlierBatch(earlier.batch_id) if earlier else None)


def submit_input(
    client: BatchClient,
    options: RunOptions,
    on_identified: Identified,
    earlier: EarlierBatch | None,
    on_progress: Progress | None = None,
) -> Submitted:
    """Queue the file. Raises Interrupted for Ctrl-C, which is not caught before the loop begins."""
    try:
        return client.submit(
            options.source,
            model=options.model,
            default_model=options.default_model,
            defaults=options.defaults,
            job_timeout_seconds=options.job_timeout_seconds or DEFAULT_JOB_TIMEOUT_SECONDS,
            on_progress=on_progress,
            on_identified=on_identified,
            options=options.batch_options,
            prompting=options.prompting,
            earlier=earlier,
        )
    except KeyboardInterrupt:
        message = "interrupted before all rows were queued. The same command goes on from here"
        raise Interrupted(signal.SIGINT, message) from None


def _delays(
    client: Client, connection: Redis, url: str, reporter: Reporter, plan: WorkerPlan
) -> Delays:
    return Delays(
        client.serving,
        reporter.note,
        plan.num_workers,
        count_apart=client.count_apart,
        open_batches=client.open_batches,
        listed=client.workers,
        refused_writes=partial(refused_writes, connection, url),
    )


def _refuse_early(
    options: RunOptions,
    connection: Redis,
    url: str,
    earlier: EarlierBatch | None,
    worker_command: Sequence[str],
    batch_id: str,
    model: str,
    relatives: frozenset[str],
) -> None:
    """Refuse, before rows are queued, an OUT, a model or rights with which no run can begin.

    Only batchkv's own workers need a model of the hub. A batch that exists goes on without its
    model: it may need no worker any more.
    """
    is_mended = earlier is not None and earlier.num_alike > 0
    is_moved = is_mended or holds_other(options.out, batch_id, relatives, NOBODY)
    if not is_moved:
        target.check_batch(options.out, batch_id)
    if options.num_workers:
        own = own_model(model, options.batch_options.adapter)
        check_model_folder(own.model)
        is_new = not connection.exists(redis_keys.batch(batch_id))
        if is_new and tuple(worker_command) == WORKER_COMMAND:
            check_model_name(own.model)
        check_rights(connection, url, model)
        check_logs(home_from_environment())


class RunLoop:
    """The loop: collects results, supervises the workers, shows progress, checks for signals."""

    def __init__(
        self,
        client: BatchClient,
        batch_id: str,
        workers: LocalWorkers,
        follower: Follower,
        reporter: Reporter,
        delays: Delays,
        outage: Outage,
    ) -> None:
        self.is_fresh = False  # with --fresh the same command would begin anew
        self.submit_again: Callable[[], None] = lambda: None
        self._outage = outage
        self._client = client
        self._batch_id = batch_id
        self._workers = workers
        self._follower = follower
        self._reporter = reporter
        self._delays = delays

    def run_until_done(self) -> RunReport:
        started, before = time.monotonic(), self._client.status(self._batch_id)
        with noted_signals() as caught:
            try:
                with called_during_outages(lambda: self._wait_for_server(caught)):
                    status = self._loop(caught, before)
            except BaseException as fault:
                self._stop(caught, is_cut_off=isinstance(fault, FullHomeError))
                if isinstance(fault, NotFoundError) and not isinstance(fault, ExpiredError):
                    raise self._forgotten() from fault
                if isinstance(fault, Interrupted):
                    raise self._interrupted(caught[0], before.total) from None
                raise
            seconds = time.monotonic() - started
            with called_during_outages(give_up):
                self._workers.stop(lambda: bool(caught))
        return RunReport(
            status=status,
            out=self._follower.results.path,
            completion_tokens=max(0, status.completion_tokens - before.completion_tokens),
            seconds=seconds,
            num_expected=self._follower.expected.num_expected,
            num_right=self._follower.num_right,
        )

    def _loop(self, caught: list[int], status: BatchStatus) -> BatchStatus:
        while True:
            num_new = read_with_retry(self._follower.collect)  # it skips rows that it has written
            self._outage.end()
            self._reporter.update(snapshot_of(status, self._delays.look(status)))
            if status.is_done:  # the status is older than the collected rows, so none is missing
                return status
            self._check_signals(caught)
            if self._delays.is_hopeless:
                raise WorkerError(
                    f"the workers of this run may not compute {rows(status.queued)} of batch "
                    f"{self._batch_id}, and no other worker serves them: {self._delays.words}. No "
                    "row is lost. `--fresh` with the same command computes all rows anew with the "
                    "workers of this machine"
                )
            self._supervise(status)
            time.sleep(self._client.poll_seconds if num_new == 0 else 0)
            status = read_with_retry(partial(self._client.status, self._batch_id))
            if not status.is_submitted:  # the server was restored from an older copy
                self._reporter.note("the server has lost rows of this batch: they are queued again")
                read_with_retry(self.submit_again)

    def _forgotten(self) -> NotFoundError:
        path = self._follower.results.path
        where = "" if path == target.STDOUT else f" in {path}"
        return NotFoundError(
            f"batch {self._batch_id} is no longer on the server: `batchkv forget` deleted it, or "
            "the server lost its data. Its rows that had not ended are gone. The answers"
            f"{where} stay; the same command computes all rows anew"
        )

    def _supervise(self, status: BatchStatus) -> None:
        """Supervise the workers. An error that ends them says how to go on with the batch."""
        try:
            self._workers.supervise(status.num_ended)
        except (RefusedWorkerError, WorkerError) as fault:
            raise type(fault)(
                f"{str(fault).rstrip('.')}. {rows(status.total - status.num_ended)} of batch "
                f"{self._batch_id} stay in the queue: the same command goes on, and "
                f"`batchkv forget {self._batch_id}` deletes the batch"
            ) from fault

    def _wait_for_server(self, caught: list[int]) -> None:
        self._outage.begin()
        self._check_signals(caught)

    def _check_signals(self, caught: list[int]) -> None:
        if caught:
            raise Interrupted(caught[0], "interrupted")

    def _interrupted(self, number: int, total: int) -> Interrupted:
        """The error that ends an interrupted run, after the last results were collected."""
        results = self._follower.results
        said = target.after_interrupt(results, self._batch_id, total, fresh=self.is_fresh)
        return Interrupted(number, said)

    def _stop(self, caught: list[int], *, is_cut_off: bool) -> None:
        """After an error or a signal: stop the workers, and collect the last results.

        ``is_cut_off``: the server runs, but refuses writes of the workers.
        """
        num_handled = min(1, len(caught))
        with called_during_outages(give_up):
            if self._outage.is_on or is_cut_off:
                self._workers.abandon()
                return
            if self._workers.pids:
                self._reporter.note(STOPPING)
            self._workers.stop(lambda: len(caught) > num_handled)
            # Only the first error is reported. An error now follows from it, or can wait.
            with suppress(BatchkvError, RedisError):
                self._follower.collect()
