"""``batchkv cancel`` and ``batchkv retry``."""

from __future__ import annotations

import click

from batchkv_producer.cli.shared import say, session, url_option


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
        say(f"{opened.client.cancel(target)} rows canceled")


@click.command()
@click.argument("batch_id", metavar="BATCH")
@url_option
def retry(batch_id: str, url: str | None) -> None:
    """Queue the failed rows of a batch again (rows that were wrong in the input stay failed).

    \b
    Examples:
      batchkv retry 3f2a9c51d07be684
      batchkv retry 3f2a9c51d07be684 && batchkv wait 3f2a9c51d07be684
    """
    with session(url) as opened:
        say(f"{opened.client.retry(batch_id)} rows are queued again")
