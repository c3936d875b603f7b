"""``batchkv keys``: makes, lists and removes the API keys of `batchkv serve`."""

from __future__ import annotations

import click

from batchkv_gateway.keys.store import ApiKey, KeyStore
from batchkv_gateway.settings import size_of
from batchkv_producer.cli.shared import json_option, print_json, redis_url_option, say, session
from batchkv_producer.errors import UsageError
from batchkv_producer.tables import print_table
from batchkv_producer.wire.batch_options import moment_text

MAX_BYTES = 2**50
FIRST_KEY = (
    ". From now on each request needs a key, and files and batches that were made without one are "
    "not found while there are keys"
)


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
@click.option("--metrics", is_flag=True, help="It reads /metrics, and nothing else.")
@click.option("--private", is_flag=True, help="Its rows share no prefix with those of other keys.")
@click.option("--max-rows", type=click.IntRange(1, 10**9), help="Rows that may be open at once.")
@click.option("--max-bytes", metavar="SIZE", help="Files that it may keep, like 2GB.")
@redis_url_option
def add(
    name: str,
    admin: bool,
    metrics: bool,
    private: bool,
    max_rows: int | None,
    max_bytes: str | None,
    url: str | None,
) -> None:
    """Make a key and print it. It is shown once: the server stores its digest only.

    As soon as there is a key, each request needs one. Each key has files and batches of its own.
    A key with --admin also sees and manages the batches of all others, and the workers. A key with
    --private learns neither by cached tokens nor by timing what others sent, nor they of it.
    """
    num_bytes = _size(max_bytes)
    with session(url) as opened:
        store = KeyStore(opened.connection)
        is_first = not store.all()
        key = store.add(
            name,
            is_admin=admin,
            reads_metrics=metrics,
            is_private=private,
            max_rows=max_rows or 0,
            max_bytes=num_bytes,
        )
    click.echo(key)
    say("it is shown once: keep it" + FIRST_KEY * is_first)


def _size(text: str | None) -> int:
    """The bytes of --max-bytes; 0 without it."""
    if text is None:
        return 0
    try:
        found = size_of(text)
    except ValueError as fault:
        raise UsageError(f"--max-bytes: {fault}") from None
    if not 1 <= found <= MAX_BYTES:
        raise UsageError("--max-bytes must be 1 byte to 1 PiB")
    return found


def _terms(key: ApiKey) -> list[str]:
    """A key's rights and limits in words."""
    terms = (
        ("admin", key.is_admin),
        ("metrics", key.reads_metrics),
        ("private", key.is_private),
        (f"{key.max_rows:,} rows", key.max_rows),
        (f"{key.max_bytes:,} bytes", key.max_bytes),
    )
    return [words for words, holds in terms if holds]


@keys_command.command(name="list")
@redis_url_option
@json_option
def list_keys(url: str | None, as_json: bool) -> None:
    """List the keys by name, without their secrets."""
    with session(url) as opened:
        found = KeyStore(opened.connection).all()
    if as_json:
        print_json(found)
        return
    if not found:
        click.echo("no API keys: `batchkv keys add NAME` makes one")
        return
    rows = [
        (key.name, key.key_id, moment_text(key.created), ", ".join(_terms(key))) for key in found
    ]
    print_table(("NAME", "ID", "MADE", "TERMS"), rows)


@keys_command.command()
@click.argument("name")
@redis_url_option
def remove(name: str, url: str | None) -> None:
    """Remove a key. Requests with it are refused from now on.

    Its batches go on. Nobody can read its files any more, and they are deleted when they expire.
    """
    with session(url) as opened:
        keys = KeyStore(opened.connection)
        keys.remove(name)
        is_last = not keys.has_any()
    say(f"removed the key {name}")
    if is_last:
        say("no key is left: on this machine the gateway needs none, and shows all batches")
