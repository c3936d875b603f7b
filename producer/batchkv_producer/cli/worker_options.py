"""The flags of ``run`` for its own workers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from batchkv_producer.errors import UsageError
from batchkv_producer.local.beginning import checked_setting
from batchkv_producer.settings_table import TABLE, Setting

R = TypeVar("R")


def _checked(setting: Setting, text: str | None) -> str | None:
    """Check a value before any worker starts. The worker's package has the checks."""
    if text is None:
        return None
    try:
        return checked_setting(setting.name, text)
    except ValueError as fault:
        raise click.BadParameter(str(fault)) from fault


def _option(setting: Setting) -> Callable[[Callable[..., R]], Callable[..., R]]:
    return click.option(
        setting.flag,
        setting.name,
        callback=lambda _context, _option, value: _checked(setting, value),
        help=setting.run_help,
        **setting.option(),
    )


_SETTINGS = tuple(setting for setting in TABLE if setting.run_help)
_WORKERS = click.option(
    "--workers",
    "num_workers",
    type=click.IntRange(0, 64),
    default=1,
    show_default=True,
    help="The number of workers to start here. 0 leaves the work to other machines.",
)


def _check_used(flags: list[str], num_workers: int) -> None:
    """Refuse flags for workers if there are no workers. Variables may be set for other commands."""
    source = click.get_current_context().get_parameter_source("trace")
    given = [*flags, *(["--trace"] if source is ParameterSource.COMMANDLINE else [])]
    if given and not num_workers:
        raise UsageError(
            f"{' and '.join(given)} would do nothing: --workers 0 starts no worker. Give it to "
            "`batchkv worker`"
        )


def worker_options(command: Callable[..., R]) -> Callable[..., R]:
    """Add the flags. The command gets ``num_workers``, and the others as ``worker_arguments``."""

    @functools.wraps(command)
    def with_arguments(*args: Any, **kwargs: Any) -> R:
        values = [(setting, kwargs.pop(setting.name)) for setting in _SETTINGS]
        given = [(setting, value) for setting, value in values if value]
        _check_used([setting.flag for setting, _ in given], kwargs["num_workers"])
        words = [
            word
            for setting, value in given
            for word in ((setting.flag,) if setting.is_bare else (setting.flag, value))
        ]
        return command(*args, worker_arguments=tuple(words), **kwargs)

    wrapped: Callable[..., R] = with_arguments
    for setting in reversed(_SETTINGS):
        wrapped = _option(setting)(wrapped)
    return _WORKERS(wrapped)
