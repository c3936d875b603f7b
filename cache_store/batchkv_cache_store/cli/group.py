"""The group ``batchkv cache``: the commands of this package, and those of other packages."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any, NoReturn

import click

from batchkv_cache_store.cli.clear_gc import clear, gc
from batchkv_cache_store.cli.inspect import inspect
from batchkv_cache_store.cli.pin import pin, unpin
from batchkv_cache_store.cli.stats_ls import list_blocks, stats
from batchkv_cache_store.cli.verify import verify

ENTRY_POINT_GROUP = "batchkv.cache_commands"
EXTRA = "batchkv[worker]"  # installs the packages that commands of other packages need

EPILOG = """\b
Examples:
  export BATCHKV_CACHE='disk:/var/cache/batchkv?max=50GB redis://hub:6380/0'
  batchkv cache stats --by-namespace
  batchkv cache ls --kind state --limit 10
  batchkv cache verify --sample 5%

\b
The tiers are those of the workers: BATCHKV_CACHE, or the file that
BATCHKV_CACHE_FILE names. The memory of workers cannot be read from outside.
Exit codes: 0 done, 1 damage was found, 2 wrong use, 3 Redis failed,
4 another tier failed.
"""


class CacheGroup(click.Group):
    """Commands in the order in which they were added, then those from entry points."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        own = list(self.commands)
        return own + sorted(set(_foreign_commands()) - set(own))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        if own:
            return own
        found = _foreign_commands().get(cmd_name)
        return _load(cmd_name, found) if found else None


@click.group(cls=CacheGroup, epilog=EPILOG)
def cache() -> None:
    """Inspect and clean the cache of prefixes that workers share."""


for command in (stats, list_blocks, inspect, verify, pin, unpin, clear, gc):
    cache.add_command(command)


def _foreign_commands() -> dict[str, EntryPoint]:
    return {found.name: found for found in entry_points(group=ENTRY_POINT_GROUP)}


def _load(name: str, found: EntryPoint) -> click.Command:
    """The command of an entry point, or one that says what to install for it."""
    try:
        command = found.load()
    except ImportError as fault:
        return _missing(name, fault.name or str(fault))
    if not isinstance(command, click.Command):
        raise click.ClickException(f"the entry point {found.value} is not a command")
    return command


def _missing(name: str, module: str) -> click.Command:
    message = f"`batchkv cache {name}` needs {module}: pip install '{EXTRA}'"
    if module.startswith("batchkv_"):  # the code of an editable installation was updated
        message = "the code of batchkv is newer than its installation: run `make venv`"

    def complain(**_: Any) -> NoReturn:
        raise click.ClickException(message)

    return click.Command(
        name,
        callback=complain,
        help=f"Not installed: pip install '{EXTRA}'.",
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )
