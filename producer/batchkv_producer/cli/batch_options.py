"""The flags of a batch, for ``submit`` and ``run``, and flags of other commands about batches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click

from batchkv_producer.local.on_done import EXIT_ON_DONE
from batchkv_producer.wire.adapter import Adapter, parse_adapter
from batchkv_producer.wire.batch_options import (
    NEVER,
    BatchOptions,
    Deadline,
    deadline_of,
    seconds_of,
)
from batchkv_producer.wire.redis_keys import PRIORITIES

R = TypeVar("R")


def _keep(_context: object, _option: object, text: str | None) -> int | None:
    return None if text is None else _parsed(seconds_of, text)


def _deadline(_context: object, _option: object, text: str | None) -> Deadline | None:
    return None if text is None else _parsed(deadline_of, text)


def _new_deadline(_context: object, _option: object, text: str | None) -> Deadline | None:
    if text is not None and text.strip().lower() == "never":
        return NEVER
    return _deadline(None, None, text)


def _adapter(_context: object, _option: object, texts: tuple[str, ...]) -> Adapter | None:
    if len(texts) > 1:
        raise click.BadParameter("a batch has one adapter: give the flag once")
    return parse_adapter(texts[0]) if texts else None


def _parsed(parse: Callable[[str], R], text: str) -> R:
    try:
        return parse(text)
    except ValueError as fault:
        raise click.BadParameter(str(fault)) from fault


def adapter_option(text: str) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """``--adapter``; ``text`` ends its help. The command gets it as ``adapter``."""
    return click.option(
        "--adapter",
        multiple=True,
        callback=_adapter,
        metavar="NAME[=FOLDER]",
        help="Use the model with this adapter (LoRA), under the name that it has on the workers. "
        f"With FOLDER {text}",
    )


_OPTIONS = (
    adapter_option(
        "only workers whose adapter has the same files compute the rows, and workers that `run` "
        "starts serve it."
    ),
    click.option(
        "--priority",
        type=click.Choice(PRIORITIES),
        help="Workers take rows of a high batch before all others of the model, and rows of a low "
        "one only when there are no others.  [default: normal]",
    ),
    click.option(
        "--expires",
        callback=_deadline,
        metavar="WHEN",
        help="A deadline: 30m, 8h or 2d from now, or a time like 2026-08-01T18:00. Rows that have "
        "not started by then fail (expired).",
    ),
    click.option(
        "--dedupe",
        is_flag=True,
        help="Compute rows with the same request once. Only rows with temperature 0 or a seed "
        "count as the same.",
    ),
    click.option(
        "--reuse",
        is_flag=True,
        help="End rows with answers that earlier batches with this flag got for the same request "
        "from the same model, scheme and dtype. Only rows with temperature 0 or a seed.",
    ),
    click.option(
        "--keep",
        "keep_seconds",
        callback=_keep,
        metavar="TIME",
        help="Delete the batch and its results this long after its end, like 7d.  [default: never]",
    ),
    click.option(
        "--fresh",
        is_flag=True,
        help="Compute all rows again, in a new generation of the batch; the old one stays.",
    ),
    click.option(
        "--mixed",
        is_flag=True,
        help="Let workers with different KV schemes and dtypes share the batch. Without this flag "
        "all rows are computed with the scheme and dtype of the first worker.",
    ),
)


def add_batch_options(command: Callable[..., R]) -> Callable[..., R]:
    """Add the flags of a batch. The command gets them as one ``batch_options``."""

    @functools.wraps(command)
    def with_options(*args: Any, **kwargs: Any) -> R:
        names = ["adapter", "priority", "expires", "dedupe", "reuse"]
        names += ["keep_seconds", "fresh", "mixed"]
        found = BatchOptions(**{name: kwargs.pop(name) for name in names})
        return command(*args, batch_options=found, **kwargs)

    wrapped: Callable[..., R] = with_options
    for option in reversed(_OPTIONS):
        wrapped = option(wrapped)
    return wrapped


from_batch_option = click.option(
    "--from",
    "source_batch",
    metavar="BATCH",
    help="Keep the answers of an earlier batch for rows with the same request, under any "
    "custom_id. Only rows that you changed are then computed.",
)
age_option = click.option(
    "--older-than",
    callback=_keep,
    metavar="TIME",
    help="Batches that were submitted longer ago than this, like 7d.",
)
new_deadline_option = click.option(
    "--expires",
    callback=_new_deadline,
    metavar="WHEN",
    help="Give the batch a new deadline (8h, 2026-08-01T18:00), or none (never). Needed if its "
    "deadline is past.  [default: the one it has]",
)
on_done_option = click.option(
    "--on-done",
    metavar="COMMAND",
    help="Run this command with the shell when the batch is done. BATCHKV_BATCH, BATCHKV_TOTAL, "
    "BATCHKV_OK, BATCHKV_FAILED and BATCHKV_CANCELED hold the id and counts of the batch. If the "
    f"command fails, the exit code is {EXIT_ON_DONE}.",
)


allow_bad_option = click.option(
    "--allow-bad",
    is_flag=True,
    help="Do not end with exit code 1 because rows are wrong in the input. They are reported.",
)
