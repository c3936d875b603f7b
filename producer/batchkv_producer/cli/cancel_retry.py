"""``batchkv cancel`` and ``batchkv retry``."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import click

from batchkv_producer.cli.batch_options import new_deadline_option
from batchkv_producer.cli.input_options import read_as_option
from batchkv_producer.cli.outcome import say_unserved
from batchkv_producer.cli.shared import generation_options, say, session, url_option
from batchkv_producer.client import Unanswered
from batchkv_producer.errors import UsageError
from batchkv_producer.intake.source import ReadAs
from batchkv_producer.intake.spooling import gathered
from batchkv_producer.progress import rows
from batchkv_producer.wire.batch_options import Deadline
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
    with session(url) as opened:
        num = opened.client.cancel(target)
    say(f"{rows(num)} canceled" + ("" if num else ": what was asked for had ended before"))


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
@click.option(
    "--from",
    "files",
    type=click.Path(path_type=Path, allow_dash=True),
    metavar="FILE",
    multiple=True,
    help="The file that was submitted (several: each with --from, in their order): also rows are "
    "queued whose jobs are no longer in Redis.",
)
@read_as_option
@generation_options
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
    """Queue the failed rows of a batch again (rows that were wrong in the input stay failed).

    A failed row's job is kept for 7 days, and other tools may delete it sooner. Then --from FILE
    queues the row from the file that was submitted. Generation flags are for --from only: repeat
    those of the submit if an older version submitted the batch.

    \b
    Examples:
      batchkv retry 3f2a9c51d07be684 --canceled
      batchkv retry 3f2a9c51d07be684 --job-timeout 7200
      batchkv retry 3f2a9c51d07be684 --expires 8h
      batchkv retry 3f2a9c51d07be684 --from prompts.jsonl
      batchkv retry 3f2a9c51d07be684 && batchkv wait 3f2a9c51d07be684
    """
    said = None if defaults == SamplingParams() else defaults
    if (said or read_as) and not files:
        raise UsageError("retry takes the flags of generation and --as with --from FILE only")
    with ExitStack() as stack:
        source = stack.enter_context(gathered(files, read_as, say)) if files else None
        opened = stack.enter_context(session(url))
        num = opened.client.retry(
            *(batch_id, canceled),
            job_timeout_seconds=job_timeout,
            expires=expires,
            source=source,
            defaults=said,
        )
        left = opened.client.unanswered(batch_id)
        name = opened.client.status(batch_id).name
        say(f"{rows(num)} queued again{_why_not_all(batch_id, left, num, name)}")
        if num:
            say_unserved(opened.client, batch_id)


def _why_not_all(batch_id: str, left: Unanswered, num_queued: int, name: str) -> str:
    """What stays as it is, and the command that would change it."""
    again = f"`batchkv retry {batch_id} --from FILE`, FILE being what was submitted ({name})"
    counts = {f"no longer have a job in Redis: {again}": left.expired}
    if not num_queued:
        counts["wrong in the input: mend the file"] = left.wrong
        counts[f"canceled: `batchkv retry {batch_id} --canceled`"] = left.canceled
    reasons = [f"{rows(num)} {why}" for why, num in counts.items() if num]
    if not num_queued and not reasons:
        reasons = ["no row has failed"]
        if left.failed:
            again = f"`batchkv failed {batch_id}` prints them, to be submitted anew"
            reasons = [f"{rows(left.failed)} failed, but another tool changed their jobs: {again}"]
    return "".join(f"; {reason}" for reason in reasons)
