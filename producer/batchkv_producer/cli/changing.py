"""``batchkv cancel`` and ``batchkv retry``."""

from __future__ import annotations

import click

from batchkv_producer.cli.shared import say, session, url_option
from batchkv_producer.cli.terms_options import new_deadline_option
from batchkv_producer.client import Unanswered
from batchkv_producer.progress import rows
from batchkv_producer.terms import Deadline


@click.command()
@click.argument("target", metavar="ID")
@url_option
def cancel(target: str, url: str | None) -> None:
    """Cancel a batch, or one job of it: what has not ended yet ends as canceled.

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
@url_option
def retry(
    batch_id: str,
    canceled: bool,
    job_timeout: int | None,
    expires: Deadline | None,
    url: str | None,
) -> None:
    """Queue the failed rows of a batch again (rows that were wrong in the input stay failed).

    \b
    Examples:
      batchkv retry 3f2a9c51d07be684 --canceled
      batchkv retry 3f2a9c51d07be684 --job-timeout 7200
      batchkv retry 3f2a9c51d07be684 --expires 8h
      batchkv retry 3f2a9c51d07be684
      batchkv retry 3f2a9c51d07be684 && batchkv wait 3f2a9c51d07be684
    """
    with session(url) as opened:
        num = opened.client.retry(
            batch_id, canceled, job_timeout_seconds=job_timeout, expires=expires
        )
        why = "" if num else _why_none(batch_id, opened.client.unanswered(batch_id))
    say(f"{rows(num)} queued again{why}")


def _why_none(batch_id: str, left: Unanswered) -> str:
    counts = {
        "wrong in the input: mend the file": left.wrong,
        "no longer there to be run: submit them anew": left.expired,
        f"canceled: `batchkv retry {batch_id} --canceled`": left.canceled,
    }
    reasons = [f"{rows(num)} {why}" for why, num in counts.items() if num]
    return "; " + "; ".join(reasons or ["no row has failed"])
