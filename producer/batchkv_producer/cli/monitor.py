"""The commands that show batches and workers: status, list, wait."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout

import click

from batchkv_producer.batch_facts import batch_fields, listed_fields
from batchkv_producer.cli.batch_options import on_done_option
from batchkv_producer.cli.end_codes import exit_code
from batchkv_producer.cli.outage import outages_told
from batchkv_producer.cli.outcome import say_canceled, say_failures
from batchkv_producer.cli.shared import (
    delays_of,
    either,
    json_option,
    print_json,
    say,
    url_option,
)
from batchkv_producer.cli.showing import (
    show_batch,
    show_job,
    show_list,
    show_overview,
)
from batchkv_producer.client import BatchStatus
from batchkv_producer.errors import UsageError
from batchkv_producer.local.follow import snapshot_of
from batchkv_producer.progress import reporter
from batchkv_producer.retry import read_with_retry

SHOWN_BATCHES = 50
WATCH_SECONDS = 2.0
_CLEAR = "\x1b[H\x1b[J"  # moves to the upper left corner and clears the screen

limit_option = click.option(
    "--limit",
    type=click.IntRange(min=0),
    metavar="N",
    help=f"The newest N batches; 0 is all.  [default: {SHOWN_BATCHES}; all with --json]",
)
watch_option = click.option(
    "--watch", "is_watching", is_flag=True, help="Repeat every 2 seconds, until Ctrl-C."
)


def _limit(given: int | None) -> int | None:
    return SHOWN_BATCHES if given is None else given or None


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

    Everything is the newest 50 batches, all workers, and the server's memory. --watch repeats the
    output every 2 seconds, until the batch or job is done, or until Ctrl-C.

    \b
    Examples:
      batchkv status
      batchkv status 3f2a9c51d07be684 --watch
      batchkv status 3f2a9c51d07be684-17
      batchkv status 3f2a9c51d07be684 --json | jq .ok
    """
    if target is not None and limit is not None:
        raise UsageError("--limit is for the list of all batches: leave out --limit or the id")
    with either(url) as opened:

        def show() -> bool:
            if target is None:
                room = opened.client.memory_use
                most = (limit or None) if as_json else _limit(limit)
                show_overview(opened.client, room, most, as_json=as_json)
                return False
            one = show_job if "-" in target else show_batch
            return one(opened.client, target, as_json=as_json)

        show_repeatedly(show, is_watching=is_watching, as_json=as_json)


@click.command(name="list")
@limit_option
@watch_option
@url_option
@json_option
def list_batches(limit: int | None, is_watching: bool, url: str | None, as_json: bool) -> None:
    """List batches, the newest first.

    The table shows the newest 50. --limit sets another number. --json lists all.

    \b
    Examples:
      batchkv list
      batchkv list --json | jq -r '.[] | select(.is_done) | .batch_id'
    """
    with either(url) as opened:

        def show() -> bool:
            client = opened.client
            if as_json:
                print_json(listed_fields(client, client.workers(), limit or None))
            else:
                show_list(client, _limit(limit))
            return False

        show_repeatedly(show, is_watching=is_watching, as_json=as_json)


@click.command()
@click.argument("batch_id", metavar="BATCH")
@click.option(
    "--timeout", type=click.FloatRange(min=0), metavar="SECONDS", help="Wait at most this long."
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

    The exit code is 5 if the command of --on-done failed. When the time is over it is not run.

    \b
    Examples:
      batchkv wait 3f2a9c51d07be684
      batchkv wait 3f2a9c51d07be684 --timeout 3600 && echo done
      batchkv wait 3f2a9c51d07be684 --on-done 'say "$BATCHKV_OK rows are done"'
    """
    with either(url) as opened:
        with reporter() as progress:
            delays = delays_of(opened, progress.note)

            def look(now: BatchStatus) -> None:
                progress.update(snapshot_of(now, delays.look(now)))

            with outages_told(progress.note):
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


# ---- --watch ----


def show_repeatedly(show: Callable[[], bool], *, is_watching: bool, as_json: bool) -> None:
    """Call ``show`` once. With ``--watch`` call it until it returns True.

    On a terminal each output replaces the one before; elsewhere an empty line separates them.
    """
    if not is_watching:
        show()
        return
    if as_json:
        raise UsageError("--watch and --json exclude each other: run --json again instead")
    is_terminal, is_first = sys.stdout.isatty(), True
    while True:
        text, is_over = read_with_retry(lambda: _captured(show))
        if is_terminal:
            text = _CLEAR + text
        elif not is_first:
            text = "\n" + text
        click.echo(text, nl=False)
        sys.stdout.flush()
        is_first = False
        if is_over:
            return
        time.sleep(WATCH_SECONDS)


class _Screen(io.StringIO):
    """Keeps what is written. It is a terminal if standard output is, so tables have its width."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def _captured(show: Callable[[], bool]) -> tuple[str, bool]:
    screen = _Screen(is_terminal=sys.stdout.isatty())
    with redirect_stdout(screen):
        is_over = show()
    return screen.getvalue(), is_over
