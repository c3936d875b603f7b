"""The commands about workers: a list, draining and resuming them, and a live view."""

from __future__ import annotations

import sys
from functools import partial

import click

from batchkv_producer.batch_facts import worker_dicts
from batchkv_producer.cli.monitor import show_repeatedly, watch_option
from batchkv_producer.cli.shared import (
    Opened,
    either,
    json_option,
    print_json,
    redis_url_option,
    say,
    session,
    url_option,
)
from batchkv_producer.cli.showing import show_workers
from batchkv_producer.errors import UsageError
from batchkv_producer.local import draining


@click.command()
@click.option(
    "--drain",
    "to_drain",
    metavar="NAME",
    multiple=True,
    help="Let this worker end its rows and take no more. It stays alive.",
)
@click.option(
    "--resume", "to_resume", metavar="NAME", multiple=True, help="Let this worker take rows again."
)
@watch_option
@url_option
@json_option
def workers(
    to_drain: tuple[str, ...],
    to_resume: tuple[str, ...],
    is_watching: bool,
    url: str | None,
    as_json: bool,
) -> None:
    """List the live workers of all machines. Drain or resume some.

    TOK/S is the mean of the last minute, over the time in which the worker had rows.

    On a hub, --drain and --resume need the admin's URL, or must run on the worker's own machine.

    \b
    Examples:
      batchkv workers
      batchkv workers --json
      batchkv workers --drain studio-1a2b3c4d
    """
    if (to_drain or to_resume) and (is_watching or as_json):
        raise UsageError("--drain and --resume print no list: leave out --watch and --json")
    with either(url) as opened:
        for name in to_drain:
            _drain(opened, name)
            say(f"{name} takes no more rows: `batchkv workers --resume {name}` ends that")
        for name in to_resume:
            _resume(opened, name)
            say(f"{name} takes rows again")
        if to_drain or to_resume:
            return

        def show() -> bool:
            found = opened.client.workers()
            if as_json:
                print_json(worker_dicts(found))
            else:
                show_workers(found)
            return False

        show_repeatedly(show, is_watching=is_watching, as_json=as_json)


@click.command()
@click.option("--once", is_flag=True, help="Print one frame and end. So does output that is piped.")
@redis_url_option
def top(once: bool, url: str | None) -> None:
    """Show batches and workers live, in this terminal.

    It reads again every 2 seconds. Up and down select a worker. d drains it: it ends its rows,
    takes no more, and stays alive. u resumes it. q or Ctrl-C ends the command.

    SLOTS are the rows that decode now, of all slots. KV is the used part of the memory for keys and
    values. CACHED is the share of prompt tokens that were not computed, since the worker's start.
    Workers of older versions have blanks. On a hub, draining needs the admin's URL, or the worker's
    own machine.

    \b
    Examples:
      batchkv top
      batchkv top --once
    """
    # Imported here: rich takes 50 ms, and most commands need none of it.
    from rich.console import Console

    from batchkv_producer.top.loop import Top
    from batchkv_producer.top.view import Reader

    with session(url) as opened:
        reader = Reader(opened.client, opened.connection)
        drain = partial(draining.drain, opened.connection)
        resume = partial(draining.resume, opened.connection)
        shown = Top(reader.read, drain, resume, Console(highlight=False))
        if once or not sys.stdout.isatty():
            shown.once()
        else:
            shown.run()


def _drain(opened: Opened, name: str) -> None:
    if opened.session is not None:
        draining.drain(opened.session.connection, name)
    elif opened.remote is not None:
        opened.remote.drain(name)


def _resume(opened: Opened, name: str) -> None:
    if opened.session is not None:
        draining.resume(opened.session.connection, name)
    elif opened.remote is not None:
        opened.remote.resume(name)
