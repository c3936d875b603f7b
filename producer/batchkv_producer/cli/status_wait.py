"""The commands that read states: status, wait, list, workers."""

from __future__ import annotations

from functools import partial

import click

from batchkv_producer.cli.batch_options import on_done_option
from batchkv_producer.cli.exit_codes import exit_code
from batchkv_producer.cli.outcome import say_canceled, say_failures
from batchkv_producer.cli.shared import (
    delays_of,
    json_option,
    print_json,
    say,
    session,
    url_option,
)
from batchkv_producer.cli.showing import (
    batch_fields,
    listed_fields,
    show_batch,
    show_job,
    show_list,
    show_overview,
    show_workers,
    worker_dicts,
)
from batchkv_producer.cli.watching import shown, watch_option
from batchkv_producer.client import BatchStatus
from batchkv_producer.errors import UsageError
from batchkv_producer.local.follow import snapshot_of
from batchkv_producer.progress import reporter
from batchkv_producer.server.memory_use import read_memory_use

SHOWN_BATCHES = 50

limit_option = click.option(
    "--limit",
    type=click.IntRange(min=0),
    metavar="N",
    help=f"The newest N batches; 0 is all.  [default: {SHOWN_BATCHES}; all with --json]",
)


def _limit(said: int | None) -> int | None:
    return SHOWN_BATCHES if said is None else said or None


@click.command()
@click.argument("target", metavar="[ID]", required=False)
@limit_option
@watch_option
@url_option
@json_option
def status(
    target: str | None, limit: int | None, is_watching: bool, url: str | None, as_json: bool
) -> None:
    """Show everything, or one batch, or one job.

    Everything is the newest 50 batches, all workers, and the server's memory. --watch repeats it
    every 2 seconds, until the batch or job is done, or until Ctrl-C.

    \b
    Examples:
      batchkv status
      batchkv status 3f2a9c51d07be684 --watch
      batchkv status 3f2a9c51d07be684-17
      batchkv status 3f2a9c51d07be684 --json | jq .ok
    """
    if target is not None and limit is not None:
        raise UsageError("--limit is for the list of all batches: leave it or the id out")
    with session(url) as opened:

        def show() -> bool:
            if target is None:
                room = partial(read_memory_use, opened.connection)
                most = (limit or None) if as_json else _limit(limit)
                show_overview(opened.client, room, most, as_json=as_json)
                return False
            one = show_job if "-" in target else show_batch
            return one(opened.client, target, as_json=as_json)

        shown(show, is_watching=is_watching, as_json=as_json)


@click.command(name="list")
@limit_option
@watch_option
@url_option
@json_option
def list_batches(limit: int | None, is_watching: bool, url: str | None, as_json: bool) -> None:
    """List batches, the newest first.

    The table shows the newest 50; --limit sets another number. --json lists all.

    \b
    Examples:
      batchkv list
      batchkv list --json | jq -r '.[] | select(.is_done) | .batch_id'
    """
    with session(url) as opened:

        def show() -> bool:
            client = opened.client
            if as_json:
                print_json(listed_fields(client, client.workers(), limit or None))
            else:
                show_list(client, _limit(limit))
            return False

        shown(show, is_watching=is_watching, as_json=as_json)


@click.command()
@watch_option
@url_option
@json_option
def workers(is_watching: bool, url: str | None, as_json: bool) -> None:
    """List the live workers of all machines.

    TOK/S is the mean of the last minute, over the time in which there were rows.

    \b
    Examples:
      batchkv workers
      batchkv workers --json
    """
    with session(url) as opened:

        def show() -> bool:
            found = opened.client.workers()
            if as_json:
                print_json(worker_dicts(found))
            else:
                show_workers(found)
            return False

        shown(show, is_watching=is_watching, as_json=as_json)


@click.command()
@click.argument("batch_id", metavar="BATCH")
@click.option(
    "--timeout", type=click.FloatRange(min=0), metavar="SECONDS", help="Wait at most so long."
)
@on_done_option
@url_option
@json_option
@click.pass_context
def wait(
    ctx: click.Context,
    batch_id: str,
    timeout: float | None,
    on_done: str | None,
    url: str | None,
    as_json: bool,
) -> None:
    """Wait until a batch is done. Exit code 1 if a row failed, 6 if the time is over.

    With --on-done, the exit code is 5 if that command failed. It is not run when the time is over.

    \b
    Examples:
      batchkv wait 3f2a9c51d07be684
      batchkv wait 3f2a9c51d07be684 --timeout 3600 && echo done
      batchkv wait 3f2a9c51d07be684 --on-done 'say "$BATCHKV_OK of $BATCHKV_TOTAL"'
    """
    with session(url) as opened:
        with reporter() as progress:
            delays = delays_of(opened, progress.note)

            def look(now: BatchStatus) -> None:
                progress.update(snapshot_of(now, delays.look(now)))

            last = opened.client.wait(batch_id, timeout_seconds=timeout, on_progress=look)
        failures = opened.client.failures(last)
        say_failures(failures, last.failed)
        if as_json:
            print_json({**batch_fields(last), "failures": failures})
        else:
            click.echo(last.reconciliation())
    if not last.is_done:
        say(f"batch {last.batch_id} is not done yet")
    say_canceled(last)
    ctx.exit(exit_code(last, on_done))
