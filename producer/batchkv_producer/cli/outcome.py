"""Prints how a batch ended, or why it makes no progress. ``end_codes`` has the exit codes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from batchkv_producer.cli.shared import say
from batchkv_producer.interface import BatchClient, BatchStatus
from batchkv_producer.monitor.delays import unserved_note
from batchkv_producer.monitor.mismatch import find_mismatch
from batchkv_producer.progress import rows
from batchkv_producer.results.failures import Failures, failure_lines
from batchkv_producer.results.outfile import errors_path
from batchkv_producer.results.target import STDOUT
from batchkv_producer.wire.error_codes import INPUT_FAULTS, ErrorCode

if TYPE_CHECKING:
    from batchkv_producer.local.run import RunReport
    from batchkv_producer.submit.kept_answers import EarlierBatch
    from batchkv_producer.submit.submission import Submitted


def say_unserved(client: BatchClient, batch_id: str) -> None:
    """Say at once if no worker serves the queue of a batch, or none may compute its rows."""
    found = client.status(batch_id)
    if not (found.is_done or found.num_workers):
        say(unserved_note(found, client.workers()))
    elif mismatch := find_mismatch(found, client.serving(found.queue)):
        say(mismatch.note)


def say_refused(num_queued: int) -> None:
    """Say after a retry how many of the queued rows had failed for what is in their lines."""
    if num_queued:
        say(
            f"of the queued rows, {num_queued:,} had failed for what is in the file, and will fail "
            "again unless the workers have changed: correct the file"
        )


def say_after_submit(
    client: BatchClient, submitted: Submitted, earlier: EarlierBatch | None, again: str
) -> None:
    """Say after a submit: no worker serves it, answers are kept, rows had failed before.

    ``again``: the flags with which ``batchkv retry`` queues rows whose jobs are gone.
    """
    say_unserved(client, submitted.batch_id)
    found = client.status(submitted.batch_id)
    if earlier:
        say(earlier.sentence(found.kept))
    if submitted.joined and found.failed > submitted.num_bad:
        has_gone = client.is_any_gone(found.batch_id, client.failures(found))
        say(
            f"{rows(found.failed - submitted.num_bad)} of this batch failed before: "
            f"{_retry_command(found, again if has_gone else '')} queues them again"
        )


def say_canceled(batch: BatchStatus) -> None:
    """Say which command queues the canceled rows again. No other command computes them."""
    if batch.canceled:
        say(
            f"{rows(batch.canceled, 'is', 'are')} canceled: "
            f"{_retry_command(batch, ' --canceled')} queues them again"
        )


def _count(failures: Iterable[Failures], *codes: str) -> int:
    return sum(group.count for group in failures if group.code in codes)


def _retry_command(batch: BatchStatus, flags: str = "") -> str:
    """The retry that this batch accepts. A batch whose deadline is past needs another one."""
    deadline = " --expires never" if 0 < batch.expires <= batch.read_at else ""
    return f"`batchkv retry {batch.batch_id}{flags}{deadline}`"


def say_failures(failures: Iterable[Failures], num_failed: int) -> None:
    """Print why rows failed, by code."""
    for line in failure_lines(failures, num_failed):
        say(line)


def say_end(report: RunReport, failures: Iterable[Failures], again: str = "") -> None:
    """Print the last lines of ``batchkv run``. ``again``: more flags for ``batchkv retry``."""
    failed, wrong, failures = report.status.failed, report.num_wrong, tuple(failures)
    too_long = _count(failures, ErrorCode.CONTEXT_LENGTH_EXCEEDED)
    refused = max(0, _count(failures, *INPUT_FAULTS) - wrong)
    say_failures(failures, failed)
    if failed:
        place = f"{errors_path(report.out)} says" if report.out != STDOUT else "their lines say"
        hints = [f"{place} why"]
        if wrong:
            hints.append(f"{rows(wrong, 'is', 'are')} wrong in the input: correct the file")
        if too_long:
            retry = _retry_command(report.status, again)
            hints.append(
                f"{rows(too_long, 'is', 'are')} too long. Where it is for the model, correct the "
                f"file; where it is for the memory, give the worker more and run {retry}"
            )
        if refused:
            hints.append(
                f"this model and its worker refuse {rows(refused)}: correct the file, or use "
                "another model"
            )
        if failed > wrong + too_long + refused:
            retried = "the others" if wrong or too_long or refused else "them"
            hints.append(
                f"{_retry_command(report.status, again)} queues {retried} again, and `batchkv run` "
                "of the same input then computes them"
            )
        say(f"{rows(failed)} failed: {'; '.join(hints)}")
    say_canceled(report.status)
    if report.out == STDOUT:
        say(report.summary())
        return
    say(f"results are in {report.out}")
    click.echo(report.summary())
