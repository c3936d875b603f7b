"""``batchkv run`` by a gateway: it sends the file and follows the batch. It starts no workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from batchkv_producer.errors import NotFoundError
from batchkv_producer.intake.expected import Expected
from batchkv_producer.local.beginning import first_line, note_what_stays
from batchkv_producer.local.follow import Follower, stale_rows
from batchkv_producer.local.local_workers import LocalWorkers, WorkerPlan
from batchkv_producer.local.mended import batch_in, earlier_of
from batchkv_producer.local.run import (
    RunLoop,
    RunOptions,
    RunReport,
    submit_again,
    submit_input,
)
from batchkv_producer.local.run_support import Outage
from batchkv_producer.monitor.delays import Delays
from batchkv_producer.progress import Reporter
from batchkv_producer.remote.client import RemoteClient
from batchkv_producer.remote.refusals import OtherBatchError
from batchkv_producer.results import target
from batchkv_producer.submit.kept_answers import EarlierBatch
from batchkv_producer.submit.submission import Submitted

_NO_BATCH = "0" * 16  # a file that holds anything else is refused
NO_WORKERS = "the gateway's workers compute the rows; this machine starts none"


def run_remotely(client: RemoteClient, options: RunOptions, reporter: Reporter) -> RunReport:
    """Run a file to its end by a gateway. Raises what ``run`` raises."""
    target.check_target(options.out, options.source)
    expected = Expected.read(options.source)
    is_printed = options.out == target.STDOUT
    earlier = None if is_printed else earlier_of(partial(_is_there, client), options.out)
    submitted = _submit(client, options, earlier)
    reporter.note(first_line(client, submitted, target.shown(options.out)))
    reporter.note(NO_WORKERS)
    timeout = options.job_timeout_seconds
    note_what_stays(client, submitted, earlier, options.out, timeout, reporter.note)
    stale = stale_rows(client, submitted.batch_id)
    with target.open_results(options.out, submitted.batch_id, stale) as results:
        follower = Follower(client, submitted.batch_id, results, expected)
        with _one_try(client):
            report = _loop(client, options, submitted, follower, reporter, earlier)
        follower.refresh(stale)
    return replace(report, num_wrong=submitted.num_bad)


def _submit(client: RemoteClient, options: RunOptions, earlier: EarlierBatch | None) -> Submitted:
    """Queue the file. A batch that is not the one in OUT is refused before its rows are queued."""
    client.out_batch = "" if options.out == target.STDOUT else batch_in(options.out)
    target.check_batch(options.out, client.out_batch or _NO_BATCH)
    try:
        return submit_input(client, options, lambda *_: None, earlier)
    except OtherBatchError as fault:
        target.check_batch(options.out, fault.batch_id)  # raises the sentence about OUT
        raise
    finally:
        client.out_batch = ""


def _loop(
    client: RemoteClient,
    options: RunOptions,
    submitted: Submitted,
    follower: Follower,
    reporter: Reporter,
    earlier: EarlierBatch | None,
) -> RunReport:
    nobody = WorkerPlan(submitted.model, "", Path(), "", num_workers=0)
    work = RunLoop(
        client,
        submitted.batch_id,
        LocalWorkers(nobody, lambda *_: 0, reporter.note),
        follower,
        reporter,
        Delays(
            client.serving, reporter.note, count_apart=client.count_apart, listed=client.workers
        ),
        Outage(reporter.note, None, "the gateway"),
    )
    work.is_fresh = options.batch_options.fresh
    work.submit_again = partial(submit_again, client, options, submitted.batch_id, earlier)
    return work.run_until_done()


def _is_there(client: RemoteClient, batch_id: str) -> bool:
    try:
        client.status(batch_id)
    except NotFoundError:
        return False
    return True


@contextmanager
def _one_try(client: RemoteClient) -> Iterator[None]:
    """Inside, the loop itself notices an outage at once, and decides how long to wait."""
    before = client.transport.retry_seconds
    client.transport.retry_seconds = 0.0
    try:
        yield
    finally:
        client.transport.retry_seconds = before
