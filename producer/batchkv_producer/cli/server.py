"""``batchkv server``: starts, stops and shows the embedded server."""

from __future__ import annotations

from socket import gethostname

import click
from redis.exceptions import RedisError

from batchkv_producer.cli.shared import json_option, print_json, say
from batchkv_producer.errors import ServerError
from batchkv_producer.local.presence import is_free
from batchkv_producer.monitor.workers import read_workers
from batchkv_producer.server import embedded
from batchkv_producer.server.home import Home, home_from_environment
from batchkv_producer.tables import print_fields

SHOWN_WORKERS = 5


@click.group()
def server() -> None:
    """Start, stop or show the embedded server.

    Other commands start it by themselves when no other Redis is named. It listens on a unix socket
    in BATCHKV_HOME (default ~/.batchkv), keeps its data there, and runs until it is stopped.

    \b
    Examples:
      export BATCHKV_REDIS_URL=$(batchkv server start)
      batchkv server status --json
      batchkv server stop
    """


@server.command()
def start() -> None:
    """Start the server if it does not run, and print its URL."""
    click.echo(embedded.ensure_running(home_from_environment()))


@server.command()
def stop() -> None:
    """Stop the server. Its data stays on disk, and the next start loads it.

    Workers and gateways do not end with the server. They wait until it is started again, and then
    go on. So stop them first (Ctrl-C) if you want to end all.
    """
    home = home_from_environment()
    names = _worker_names(home)
    if not embedded.stop(home):
        say("no server was running")
        return
    say("the server is stopped")
    if names:
        listed = ", ".join(names[:SHOWN_WORKERS]) + (", .." if names[SHOWN_WORKERS:] else "")
        workers, pronoun = ("worker was", "it") if len(names) == 1 else ("workers were", "them")
        say(
            f"{len(names)} {workers} connected ({listed}). A worker keeps its rows and goes on "
            f"when the server is started again. Ctrl-C ends {pronoun}"
        )


def _worker_names(home: Home) -> list[str]:
    """The names of the workers that use this server; none if it does not run or answer.

    Workers of this machine that were killed are left out. They count as live for some time.
    """
    here = gethostname()
    if not embedded.status(home).is_running:
        return []
    try:
        with embedded.client_of(home) as connection:
            found = [worker for worker in read_workers(connection) if not worker.is_away]
            return [one.name for one in found if one.hostname != here or not is_free(one.pid)]
    except RedisError:
        return []


@server.command()
@json_option
@click.pass_context
def status(ctx: click.Context, as_json: bool) -> None:
    """Show process, version, memory, socket and data folder. Exit code 3 if it does not run."""
    found = embedded.status(home_from_environment())
    if as_json:
        print_json(found)
    elif found.is_running:
        assert found.memory_bytes is not None
        print_fields(
            [
                ("process", str(found.pid)),
                ("version", f"{found.name} {found.version}"),
                ("memory", f"{found.memory_bytes / 2**20:,.1f} MiB"),
                ("uptime", f"{found.uptime_seconds} s"),
                ("url", found.url),
                ("data", found.data_dir),
                ("log", found.log),
            ]
        )
    else:
        say(f"no server runs for {found.data_dir}")
    if not found.is_running:
        ctx.exit(ServerError.exit_code)
