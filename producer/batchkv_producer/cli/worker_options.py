"""The flags of ``run`` that are about its workers."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from batchkv_producer.errors import UsageError
from batchkv_producer.local.beginning import canonical

R = TypeVar("R")

MAX_SLOTS = 4096
MIN_MEMORY_BYTES = 2**20
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?b?", re.IGNORECASE)


def _checked_size(text: str | None) -> str | None:
    if text is not None:
        match = _SIZE.fullmatch(text.strip())
        base = 1024 if match and match[3] else 1000
        power = " kmgt".index((match[2] or " ").lower()) if match else 0
        if not match or float(match[1]) * base**power < MIN_MEMORY_BYTES:
            raise click.BadParameter(f"{text!r} is not a size of at least 1MiB, like 4GB or 512MiB")
    return text


def _checked_scheme(text: str | None) -> str | None:
    try:
        return None if text is None else canonical(text)
    except ValueError as fault:
        raise click.BadParameter(str(fault)) from fault


_OPTIONS = (
    click.option(
        "--workers",
        "num_workers",
        type=click.IntRange(0, 64),
        default=1,
        show_default=True,
        help="Workers to run here; 0: leave the work to those of other machines.",
    ),
    click.option(
        "--kv-scheme",
        metavar="SCHEME",
        callback=lambda _context, _option, value: _checked_scheme(value),
        help="How the workers keep keys and values: affine8, affine4, k8v4, turbo4, float ...",
    ),
    click.option(
        "--slots",
        type=click.IntRange(1, MAX_SLOTS),
        metavar="N",
        help="Rows a worker decodes at once, at most.",
    ),
    click.option(
        "--memory",
        metavar="SIZE",
        callback=lambda _context, _option, value: _checked_size(value),
        help="Memory that a worker may use, like 12GB.",
    ),
)


def _check_used(words: list[str], num_workers: int) -> None:
    """Refuse flags of workers where there are none. A variable may stand there for others."""
    source = click.get_current_context().get_parameter_source("trace")
    said = [*words[::2], *(["--trace"] if source is ParameterSource.COMMANDLINE else [])]
    if said and not num_workers:
        raise UsageError(
            f"{' and '.join(said)} would do nothing: with --workers 0 this command has no workers; "
            "give it to `batchkv worker`"
        )


def worker_options(command: Callable[..., R]) -> Callable[..., R]:
    """Add the flags; the command gets ``num_workers``, and the rest as ``worker_arguments``."""

    @functools.wraps(command)
    def with_arguments(*args: Any, **kwargs: Any) -> R:
        said = {name: kwargs.pop(name) for name in ("kv_scheme", "slots", "memory")}
        words = [
            word
            for name, value in said.items()
            if value
            for word in (f"--{name.replace('_', '-')}", str(value))
        ]
        _check_used(words, kwargs["num_workers"])
        return command(*args, worker_arguments=tuple(words), **kwargs)

    wrapped: Callable[..., R] = with_arguments
    for option in reversed(_OPTIONS):
        wrapped = option(wrapped)
    return wrapped
