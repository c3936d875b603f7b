"""``batchkv server``: starts, stops and shows the embedded server."""

from __future__ import annotations

import click

from batchkv_producer.cli.shared import json_option, print_json, say
from batchkv_producer.cli.tables import print_fields
from batchkv_producer.errors import ServerError
from batchkv_producer.server import embedded
from batchkv_producer.server.home import home_from_environment


@click.group()
def server() -> None:
    """Start, stop or look at the embedded server.

    Other commands start it by themselves when no other Redis is named. It listens on a unix socket
    in BATCHKV_HOME (default ~/.batchkv), keeps its data there, and goes on until it is stopped.

    \b
    Examples:
      export BATCHKV_REDIS_URL=$(batchkv server start)
      batchkv server status --json
      batchkv server stop
    """


@server.command()
def start() -> None:
    """Start it if it does not run, and print its URL."""
    click.echo(embedded.ensure_running(home_from_environment()))


@server.command()
def stop() -> None:
    """Stop it. What it holds stays on disk, and is there at the next start."""
    was_running = embedded.stop(home_from_environment())
    say("the server is stopped" if was_running else "no server was running")


@server.command()
@json_option
@click.pass_context
def status(ctx: click.Context, as_json: bool) -> None:
    """Show process, version, memory, socket and data folder; exit code 3 when it does not run."""
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
