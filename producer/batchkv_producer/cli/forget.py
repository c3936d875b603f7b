"""``batchkv forget``."""

from __future__ import annotations

import sys

import click

from batchkv_producer.cli.batch_options import age_option
from batchkv_producer.cli.shared import say, session, url_option
from batchkv_producer.client import BatchStatus
from batchkv_producer.errors import UsageError
from batchkv_producer.manage import forget as forgetting
from batchkv_producer.monitor.status import match_batch, read_batches
from batchkv_producer.progress import rows


@click.command()
@click.argument("batch_ids", metavar="[BATCH]...", nargs=-1)
@age_option
@click.option("-m", "--model", metavar="MODEL", help="Batches of this model.")
@click.option("--all-done", is_flag=True, help="Batches that are done.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@url_option
def forget(
    batch_ids: tuple[str, ...],
    older_than: int | None,
    model: str | None,
    all_done: bool,
    yes: bool,
    url: str | None,
) -> None:
    """Delete batches from the server, with their rows and results, in any state.

    Queued rows are never run. Workers drop their rows of it within a second. Files of results stay.
    A batch must fit all of --older-than, --model and --all-done that are given; without --all-done,
    batches that are not done fit too. It works on a server that is full. If it is interrupted, the
    next `forget`, a look at the batch, or any worker finishes it.

    \b
    Examples:
      batchkv forget 3f2a9c51d07be684
      batchkv forget --all-done --older-than 7d --yes
      batchkv forget --model a-model-that-nobody-serves
    """
    if batch_ids and (older_than or model or all_done):
        raise UsageError(
            "name batches, or say which by --older-than, --model, --all-done: not both"
        )
    with session(url) as opened:
        client = opened.client
        if batch_ids:
            full = dict.fromkeys(match_batch(opened.connection, batch) for batch in batch_ids)
            there = {found.batch_id: found for found in read_batches(opened.connection, [*full])}
            targets = {batch: there.get(batch) for batch in full}
        else:
            chosen = forgetting.choose(
                client.each_batch(),
                older_than_seconds=older_than or 0,
                model=model,
                all_done=all_done,
            )
            targets = {found.batch_id: found for found in chosen}
        if not targets:
            say("no batch on this server fits that")
            return
        if not yes:
            _ask(targets)
        for batch_id, found in targets.items():
            client.forget(batch_id)
            say(f"forgot batch {batch_id}" + (f" with {rows(found.total)}" if found else ""))


def _ask(targets: dict[str, BatchStatus | None]) -> None:
    if not sys.stdin.isatty():
        raise UsageError(
            "forget asks before it throws anything away, and nobody can be asked here: add --yes"
        )
    for batch_id, found in targets.items():
        state = f"{found.name}, {found.whole_sum()}" if found else "nothing but its name is left"
        say(f"batch {batch_id}: {state}")
    what = "this batch" if len(targets) == 1 else f"these {len(targets):,} batches"
    if not click.confirm(f"Forget {what} and all results on the server?", err=True):
        raise UsageError("nothing was forgotten")
