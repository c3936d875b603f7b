"""Parts that several commands share: options, the connection, output."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import click
from redis import Redis

from batchkv_producer.client import Client
from batchkv_producer.errors import UsageError
from batchkv_producer.interface import BatchClient
from batchkv_producer.monitor.delays import Delays
from batchkv_producer.progress import printable
from batchkv_producer.remote.client import RemoteClient
from batchkv_producer.remote.opening import connect_gateway
from batchkv_producer.server import connection
from batchkv_producer.server.memory_use import full_server_named
from batchkv_producer.settings_table import BY_NAME
from batchkv_producer.submit.fingerprint import progress_to
from batchkv_producer.wire.job import SamplingParams

P = ParamSpec("P")
R = TypeVar("R")

MODEL_VARIABLE = BY_NAME["model"].variable

trace_option = click.option(
    "--trace",
    metavar="FILE",
    type=click.Path(path_type=Path),
    envvar=BY_NAME["trace"].variable,
    help="Write where the worker's time goes, for Perfetto. A second worker writes FILE-2, etc.",
)
_REDIS_URL = (
    "The Redis to use: redis://, rediss:// or unix://. Put a URL with a password into "
    "BATCHKV_REDIS_URL, or into the file that BATCHKV_REDIS_URL_FILE names: other users can see "
    "command lines. "
)
_NO_URL = " [default: the embedded server]"
url_option = click.option(
    "--url",
    metavar="URL",
    help=f"{_REDIS_URL}The http:// URL of a gateway will do for most commands about batches. "
    f"{_NO_URL}",
)
redis_url_option = click.option("--url", metavar="URL", help=f"{_REDIS_URL}{_NO_URL}")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def _one_model(_context: object, _option: object, named: tuple[str, ...]) -> str | None:
    if len(set(named)) > 1:
        raise UsageError(
            f"-m {' -m '.join(named)}: a batch has one model. Split the file, and give each "
            "part its own command; `batchkv worker` takes several -m"
        )
    return named[0] if named else None


model_option = click.option(
    "-m",
    "--model",
    metavar="MODEL",
    multiple=True,
    callback=_one_model,
    help="The model of all rows.  [default: the one that all lines name, else BATCHKV_MODEL]",
)


def out_option(metavar: str, text: str) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """``-o``: the file for results. The command gets it as ``out``."""
    kind = click.Path(path_type=Path)
    return click.option("-o", "--output", "out", type=kind, metavar=metavar, help=text)


_GENERATION = (
    ("--max-tokens", int, "Generate at most this many tokens."),
    ("--temperature", float, "0 always takes the likeliest token."),
    ("--top-p", float, "Sample from the likeliest tokens with this total probability."),
    ("--top-k", int, "Sample from this many of the likeliest tokens; 0 is all."),
    ("--min-p", float, "Drop tokens whose probability is below this share of the likeliest one's."),
    ("--repetition-penalty", float, "Above 1, tokens that occurred already become less likely."),
    ("--thinking-budget", int, "End the reasoning after this many tokens; 0 is none at all."),
)


def generation_flags(note: str, *, seed: str) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Add the flags of generation. The command gets them as one ``defaults``.

    ``note`` ends the help of each flag; ``seed`` is the help of ``--seed``.
    """

    def add(command: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(command)
        def with_defaults(*args: Any, **kwargs: Any) -> R:
            found = {f.name: kwargs.pop(f.name) for f in fields(SamplingParams) if f.name in kwargs}
            return command(*args, defaults=SamplingParams(**found), **kwargs)

        wrapped: Callable[..., R] = click.option(
            "--stop",
            multiple=True,
            metavar="TEXT",
            help=f"Stop before this text. May be repeated. {note}".rstrip(),
        )(with_defaults)
        for name, kind, text in reversed((*_GENERATION, ("--seed", int, seed))):
            wrapped = click.option(name, type=kind, help=f"{text} {note}".rstrip())(wrapped)
        return wrapped

    return add


def generation_options(command: Callable[..., R]) -> Callable[..., R]:
    """Add the flags of generation for all rows of a batch."""
    seed = "The seed of every row. Without it each row gets its own."
    return generation_flags("Rows may set their own.", seed=seed)(command)


@dataclass(frozen=True, slots=True)
class Opened:
    """An open client of Redis or of a gateway.

    ``refused_writes`` returns a sentence if the server's disk is full. ``session``: None for a
    gateway. ``remote``: None for Redis.
    """

    client: BatchClient
    refused_writes: Callable[[], str]
    session: Session | None = None
    remote: RemoteClient | None = None


@dataclass(frozen=True, slots=True)
class Session:
    """An open connection, the client on it, and the URL that both use."""

    client: Client
    connection: Redis
    url: str
    is_embedded: bool


def is_by_gateway(url: str | None) -> bool:
    """Whether a command goes to a gateway. Raises UsageError for a wrong variable."""
    return connection.is_gateway(connection.resolve_url(url))


@contextmanager
def either(url: str | None) -> Iterator[Opened]:
    """Connect to a gateway, if the URL is http:// or https://, else to Redis."""
    named = connection.resolve_url(url)
    if named is not None and connection.is_gateway(named):
        with progress_to(say):
            remote = connect_gateway(named, say)
            yield Opened(remote, lambda: "", remote=remote)
        return
    with session(url) as opened:
        refused = partial(connection.refused_writes, opened.connection, opened.url)
        yield Opened(opened.client, refused, session=opened)


@contextmanager
def session(url: str | None) -> Iterator[Session]:
    """Connect, to the embedded server by default. Inside, errors of Redis become ServerErrors."""
    is_embedded = connection.resolve_url(url) is None
    resolved = connection.url_in_use(url)
    with (
        connection.server_errors(resolved),
        connection.connect(resolved, say) as redis,
        full_server_named(redis),
        progress_to(say),
    ):
        yield Session(Client(redis), redis, resolved, is_embedded)


def delays_of(opened: Opened, note: Callable[[str], None]) -> Delays:
    """Finds out why a batch is slow. ``note`` gets sentences that say what to do about it."""
    own = opened.session
    return Delays(
        opened.client.serving,
        note,
        count_apart=opened.client.count_apart,
        open_batches=own.client.open_batches if own is not None else lambda _: (),
        refused_writes=opened.refused_writes,
        listed=opened.client.workers,
    )


def default_model() -> str | None:
    """The model for rows that name none: the value of BATCHKV_MODEL."""
    return os.environ.get(MODEL_VARIABLE, "").strip() or None


def say(text: str) -> None:
    """Print a line for people on standard error."""
    click.echo(f"batchkv: {printable(text)}", err=True)


def print_json(value: Any) -> None:
    """Print dataclasses, and lists and dicts of them, as indented JSON.

    An iterator becomes a list. Each item is printed as soon as it is there.
    """
    _print_part(value, "")
    click.echo("")


def _print_part(value: Any, margin: str) -> None:
    inner = f"{margin}  "
    if isinstance(value, dict) and any(isinstance(each, Iterator) for each in value.values()):
        opening, closing, parts = "{", "}", ((f"{json.dumps(k)}: ", v) for k, v in value.items())
    elif isinstance(value, Iterator):
        opening, closing, parts = "[", "]", (("", each) for each in value)
    else:
        text = json.dumps(value, ensure_ascii=True, indent=2, default=_plain)
        click.echo(text.replace("\n", f"\n{margin}"), nl=False)
        return
    click.echo(opening, nl=False)
    count = 0
    for count, (name, each) in enumerate(parts, 1):
        click.echo(f"{',' if count > 1 else ''}\n{inner}{name}", nl=False)
        _print_part(each, inner)
    click.echo(f"\n{margin}{closing}" if count else closing, nl=False)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = {f.name: getattr(value, f.name) for f in fields(value)}
        if "num_duplicates" in found:
            found["num_twins"] = found["num_duplicates"]  # the name up to 0.1.0
        return found
    return list(value) if isinstance(value, set | frozenset | tuple) else str(value)
