"""``batchkv keys``: makes, lists and removes the API keys of `batchkv serve`."""

from __future__ import annotations

import click

from batchkv_gateway.keys.store import KeyStore
from batchkv_producer.cli.shared import json_option, print_json, say, session, url_option
from batchkv_producer.wire.batch_options import moment_text


@click.group()
def keys_command() -> None:
    """API keys of `batchkv serve`.

    \b
    Examples:
      batchkv keys add laptop
      batchkv keys add mine --admin
      batchkv keys list
      batchkv keys remove laptop
    """


@keys_command.command()
@click.argument("name")
@click.option("--admin", is_flag=True, help="It sees and manages all batches and workers.")
@click.option("--metrics", is_flag=True, help="It may read /metrics.")
@url_option
def add(name: str, admin: bool, metrics: bool, url: str | None) -> None:
    """Make a key and print it. It is shown once: the server stores its digest only.

    As soon as there is a key, each request needs one. Each key has files and batches of its own.
    A key with --admin also sees and manages the batches of all others, and the workers.
    """
    with session(url) as opened:
        click.echo(KeyStore(opened.connection).add(name, is_admin=admin, reads_metrics=metrics))


@keys_command.command(name="list")
@url_option
@json_option
def list_keys(url: str | None, as_json: bool) -> None:
    """List the keys by name, without their secrets."""
    with session(url) as opened:
        found = KeyStore(opened.connection).all()
    if as_json:
        print_json(found)
        return
    for key in found:
        rights = [
            word for word, has in (("admin", key.is_admin), ("metrics", key.reads_metrics)) if has
        ]
        click.echo("  ".join([key.name, key.key_id, f"made {moment_text(key.created)}", *rights]))


@keys_command.command()
@click.argument("name")
@url_option
def remove(name: str, url: str | None) -> None:
    """Remove a key. Requests with it are refused from now on.

    Its batches go on. Nobody can read its files any more, and they are deleted when they expire.
    """
    with session(url) as opened:
        KeyStore(opened.connection).remove(name)
    say(f"removed the key {name}")
