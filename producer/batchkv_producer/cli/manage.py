"""The commands that change a batch or repeat rows: cancel, retry, failed, forget."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import click

from batchkv_producer.cli.batch_options import age_option, new_deadline_option
from batchkv_producer.cli.input_options import Given, from_file_option, read_as_option
from batchkv_producer.cli.outcome import say_refused, say_unserved
from batchkv_producer.cli.shared import either, generation_flags, say, url_option
from batchkv_producer.client import BatchStatus, Deadline, Unanswered
from batchkv_producer.errors import UsageError
from batchkv_producer.intake.source import ReadAs
from batchkv_producer.manage import forget as forgetting
from batchkv_producer.manage.input_lines import MissingLines
from batchkv_producer.progress import printable, rows
from batchkv_producer.results import outfile
from batchkv_producer.wire.job import SamplingParams


@click.command()
@click.argument("target", metavar="ID")
@url_option
def cancel(target: str, url: str | None) -> None:
    """Cancel a batch, or one job of it. Rows that have not ended end as canceled.

    \b
    Examples:
      batchkv cancel 3f2a9c51d07be684
      batchkv cancel 3f2a9c51d07be684-17
    """
    with either(url) as opened:
        num = opened.client.cancel(target)
    say(f"{rows(num, 'was', 'were')} canceled" if num else "no row was canceled: all had ended")


@click.command()
@click.argument("batch_id", metavar="BATCH")
@click.option("--canceled", is_flag=True, help="Queue the canceled rows again too.")
@click.option(
    "--job-timeout",
    type=click.IntRange(min=1),
    metavar="SECONDS",
    help="Give these rows a new timeout.  [default: the one they had]",
)
@new_deadline_option
@from_file_option(
    "The file that was submitted. Rows whose jobs are no longer in Redis are then queued from "
    "it. Several files: each with --from, in the order of the submit."
)
@read_as_option("Only with --from: read every line as JSON, or as a prompt.")
@generation_flags("Only with --from, for rows that set none.", seed="The seed of every row.")
@url_option
def retry(
    batch_id: str,
    canceled: bool,
    job_timeout: int | None,
    expires: Deadline | None,
    files: tuple[Path, ...],
    read_as: ReadAs | None,
    defaults: SamplingParams,
    url: str | None,
) -> None:
    """Queue the failed rows of a batch again.

    Rows that were wrong in the input stay failed. A failed row's job is kept for 7 days, and other
    tools may delete it sooner. Then --from FILE queues the row from the file that was submitted.
    Generation flags are for --from only: repeat those of the submit if an older version submitted
    the batch.

    \b
    Examples:
      batchkv retry 3f2a9c51d07be684 --canceled
      batchkv retry 3f2a9c51d07be684 --job-timeout 7200
      batchkv retry 3f2a9c51d07be684 --expires 8h
      batchkv retry 3f2a9c51d07be684 --from prompts.jsonl
      batchkv retry 3f2a9c51d07be684 && batchkv wait 3f2a9c51d07be684
    """
    given = None if defaults == SamplingParams() else defaults
    if (given or read_as) and not files:
        raise UsageError("the flags of generation and --as are for retry --from FILE only")
    with ExitStack() as stack:
        source = stack.enter_context(Given(files, read_as).opened()) if files else None
        opened = stack.enter_context(either(url))
        refused = opened.client.unanswered(batch_id).refused
        num = opened.client.retry(
            *(batch_id, canceled),
            job_timeout_seconds=job_timeout,
            expires=expires,
            source=source,
            defaults=given,
        )
        left = opened.client.unanswered(batch_id)
        name = opened.client.status(batch_id).name
        queued = rows(num, "was", "were") if num else "no row was"
        say(". ".join([f"{queued} queued again", *_why_not_all(batch_id, left, num, name)]))
        if num:
            say_refused(refused)
            say_unserved(opened.client, batch_id)


def _why_not_all(batch_id: str, left: Unanswered, num_queued: int, name: str) -> list[str]:
    """Sentences about the rows that were not queued, each with the command that helps."""
    reasons = []
    if left.expired:
        reasons.append(
            f"{rows(left.expired, 'has', 'have')} no job in Redis any more: `batchkv retry "
            f"{batch_id} --from FILE` queues them. FILE is the submitted file ({name})"
        )
    if left.wrong:
        reasons.append(f"{rows(left.wrong, 'is', 'are')} wrong in the input: correct the file")
    if num_queued:
        return reasons
    if left.canceled:
        reasons.append(
            f"{rows(left.canceled, 'is', 'are')} canceled: `batchkv retry {batch_id} --canceled` "
            "queues them again"
        )
    if left.failed and not reasons:
        reasons.append(
            f"{rows(left.failed)} failed, but another tool changed their jobs: `batchkv failed "
            f"{batch_id}` prints their lines, which can be submitted"
        )
    return reasons or ["No row has failed or was canceled"]


@click.command()
@click.argument("batch_id", metavar="BATCH")
@click.option("--canceled", is_flag=True, help="Print the canceled rows too.")
@url_option
@click.pass_context
def failed(ctx: click.Context, batch_id: str, canceled: bool, url: str | None) -> None:
    """Print the failed rows of a batch as input lines.

    You can correct and submit them as a file. They are OpenAI Batch lines with the rows' own
    custom_ids, the batch's model and its defaults. Plain prompts stay lines without a url. Exit
    code 1 if a row cannot be printed: a row that was wrong in the input is in your file only. So is
    a row whose job is no longer in Redis, which keeps jobs of failed rows for 7 days.

    \b
    Examples:
      batchkv failed 3f2a9c51d07be684 > bad.jsonl
      batchkv failed 3f2a9c51d07be684 --canceled | jq -r .custom_id
    """
    missing, num_lines = MissingLines(), 0
    is_terminal = sys.stdout.isatty()
    with either(url) as opened:
        status = opened.client.status(batch_id)
        for line in opened.client.failed_lines(status, missing, canceled=canceled):
            sys.stdout.buffer.write(outfile.encoded(printable(line) if is_terminal else line))
            num_lines += 1
    sys.stdout.buffer.flush()
    say(f"printed {rows(num_lines)} of batch {status.batch_id}")
    if missing.num_wrong:
        wrong = rows(missing.num_wrong, "is", "are")
        say(f"{wrong} wrong in the input: correct the file ({status.name})")
    if missing.num_gone:
        say(
            f"{rows(missing.num_gone, 'has', 'have')} no job in Redis any more: `batchkv retry "
            f"{status.batch_id} --from FILE` queues them. FILE is the submitted file"
        )
    ctx.exit(1 if missing.num_wrong or missing.num_gone else 0)


@click.command()
@click.argument("batch_ids", metavar="[BATCH]...", nargs=-1)
@age_option
@click.option("-m", "--model", metavar="MODEL", help="Batches of this model.")
@click.option("--all-done", is_flag=True, help="Batches that are done.")
@click.option(
    "--yes",
    is_flag=True,
    help="Do not ask. Needed where standard input is not a terminal: there nobody can be asked.",
)
@url_option
def forget(
    batch_ids: tuple[str, ...],
    older_than: int | None,
    model: str | None,
    all_done: bool,
    yes: bool,
    url: str | None,
) -> None:
    """Delete batches with their rows and results, in any state.

    It asks first. In a pipe or a script it deletes nothing without --yes.

    Queued rows are never run. Workers drop rows of the batch within a second. Files of results
    stay. A batch must fit all of --older-than, --model and --all-done that are given; without
    --all-done, batches that are not done fit too. It works on a server that is full. If it is
    interrupted, the next `forget`, `status` or `list`, or any worker, finishes it.

    \b
    Examples:
      batchkv forget 3f2a9c51d07be684
      batchkv forget --all-done --older-than 7d --yes
      batchkv forget --model a-model-that-nobody-serves
    """
    if batch_ids and (older_than or model or all_done):
        raise UsageError("name batches, or choose by --older-than, --model, --all-done: not both")
    with either(url) as opened:
        client = opened.client
        if batch_ids:
            targets = client.named(batch_ids)
        else:
            chosen = forgetting.choose(
                client.each_batch(in_queue=True),  # answers in files go by name only
                older_than_seconds=older_than or 0,
                model=model,
                all_done=all_done,
            )
            targets = {found.batch_id: found for found in chosen}
        if not targets:
            say("no batch on this server fits these flags")
            return
        if not yes:
            _confirm(targets)
        for batch_id, found in targets.items():
            client.forget(batch_id)
            say(f"deleted batch {batch_id}" + (f" with {rows(found.total)}" if found else ""))


def _confirm(targets: dict[str, BatchStatus | None]) -> None:
    """Ask at the terminal. Raises UsageError if the answer is no, or nobody can be asked."""
    if not sys.stdin.isatty():
        raise UsageError(
            "forget asks before it deletes, but standard input is not a terminal: add --yes. "
            "Nothing was deleted"
        )
    for batch_id, found in targets.items():
        state = f"{found.name}, {found.whole_sum()}" if found else "only its name is left"
        say(f"batch {batch_id}: {state}")
    what = "this batch" if len(targets) == 1 else f"these {len(targets):,} batches"
    if not click.confirm(f"Delete {what} and all results on the server?", err=True):
        raise UsageError("nothing was deleted")
