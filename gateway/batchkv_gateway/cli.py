"""``batchkv serve``: the gateway as a command."""

from __future__ import annotations

import functools
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from batchkv_gateway.assembly import make_app, running_parts
from batchkv_gateway.http.server import serve
from batchkv_gateway.keys.sessions import Sessions
from batchkv_gateway.keys.store import KeyStore
from batchkv_gateway.page.opening import open_page
from batchkv_gateway.settings import GatewaySettings, is_loopback
from batchkv_producer.cli.shared import Session, redis_url_option, say, session
from batchkv_producer.errors import UsageError
from batchkv_producer.settings_table import GATEWAY_BY_NAME

END_SECONDS = 8.0  # that the parts have to end, after the last request

R = TypeVar("R")


def gateway_options(command: Callable[..., R]) -> Callable[..., R]:
    """Add the flags of the table. The command gets them as one ``flags``."""

    @functools.wraps(command)
    def with_flags(*args: Any, **kwargs: Any) -> R:
        flags = {name: kwargs.pop(name) for name in GATEWAY_BY_NAME}
        given = {n: ",".join(v) or None if isinstance(v, tuple) else v for n, v in flags.items()}
        return command(*args, flags=given, **kwargs)

    wrapped: Callable[..., R] = with_flags
    for each in reversed(GATEWAY_BY_NAME.values()):
        option = click.option(each.flag, each.name, help=each.flag_help(), **each.option())
        wrapped = option(wrapped)
    return wrapped


@click.command()
@gateway_options
@click.option("--open", "is_opening", is_flag=True, help="Open the page in this machine's browser.")
@redis_url_option
def serve_command(flags: dict[str, str | None], is_opening: bool, url: str | None) -> None:
    """Serve a page and OpenAI's API over HTTP.

    Clients of OpenAI's API use it with another base_url. It prints this URL and serves until
    Ctrl-C. Workers compute the answers: start them with `batchkv worker`. After a restart all
    batches go on.

    On this machine it needs no API key until `batchkv keys add` has made one.

    \b
    Examples:
      batchkv serve
      batchkv serve --open
      batchkv serve --host 0.0.0.0 --tls-cert cert.pem --tls-key key.pem
    """
    settings = GatewaySettings.read(flags)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    with session(url) as opened:
        _refuse_unsafe(settings, opened)
        if is_opening and not is_loopback(settings.host):
            raise UsageError(
                f"--open is for a gateway of this machine alone, and --host is {settings.host}: "
                "open its page yourself and sign in with a key"
            )
        run(opened, settings, is_opening=is_opening)


def run(opened: Session, settings: GatewaySettings, *, is_opening: bool = False) -> None:
    """Serve until a signal ends it. ``is_opening``: show the page in a browser."""
    with _last_end() as last_end, running_parts(opened.connection, settings) as parts:

        def on_ready(base_url: str) -> None:
            click.echo(f"serving {base_url}")
            page = base_url.removesuffix("v1")
            say(f"its page is {page}")
            if is_opening:
                sessions = Sessions(parts.connection, parts.keys)
                open_page(page, parts.keys, sessions, parts.files.folder.path)

        try:
            serve(make_app(parts), settings, parts.stopping, on_ready)
        finally:
            last_end.start()
    say("the gateway has stopped; batches that workers compute go on")


@contextmanager
def _last_end() -> Iterator[threading.Timer]:
    """Ends the process some seconds after its start, unless the block has ended before.

    A server that hangs keeps the threads of the parts. Each step can be cut: it is done again.
    """

    def end() -> None:
        say("the gateway has stopped in the middle of a step; the next start goes on with it")
        os._exit(0)

    timer = threading.Timer(END_SECONDS, end)
    timer.daemon = True
    try:
        yield timer
    finally:
        timer.cancel()


def _refuse_unsafe(settings: GatewaySettings, opened: Session) -> None:
    """Raise UsageError where strangers could call the gateway, or read along."""
    if settings.tls_key:
        try:
            mode = Path(settings.tls_key).stat().st_mode
        except OSError as fault:
            raise UsageError(f"--tls-key {settings.tls_key}: {fault.strerror}") from fault
        if stat.S_IMODE(mode) & 0o077:
            raise UsageError(
                f"--tls-key {settings.tls_key}: others may open it: `chmod 600` closes it"
            )
    if is_loopback(settings.host):
        return
    if not KeyStore(opened.connection).has_any():
        raise UsageError(
            f"--host {settings.host} can be reached from other machines: make a key first "
            "(`batchkv keys add NAME`)"
        )
    if not settings.tls_cert and not settings.is_plain:
        raise UsageError(
            f"--host {settings.host} can be reached from other machines: give --tls-cert and "
            "--tls-key, or --plain if the network is trusted or a proxy has TLS"
        )
