"""``batchkv service``: installs workers and servers as services, removes them, shows them."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import click

from batchkv_producer.errors import UsageError
from batchkv_producer.intake.checks import model_name
from batchkv_producer.local.beginning import checked_setting
from batchkv_producer.server.binary import find_binary
from batchkv_producer.service.checks import guarded_places, need_label, need_plain
from batchkv_producer.service.launchd import Launchd
from batchkv_producer.service.machine import LINUX, MACOS, Machine, this_machine
from batchkv_producer.service.manager import Acting, Manager
from batchkv_producer.service.spec import (
    SERVER_LABELS,
    WORKER_LABEL,
    Service,
    WorkerPlan,
    server_service,
    worker_service,
)
from batchkv_producer.service.systemd import Systemd
from batchkv_producer.settings_table import BY_NAME, TABLE, ValueType
from batchkv_producer.wire.adapter import parse_adapter

R = TypeVar("R")
EXIT_NOT_RUNNING = 1
_PATH = click.Path(path_type=Path)
_SETTINGS = tuple(setting for setting in TABLE if setting.name not in ("", "model", "cache"))


@click.group()
def service() -> None:
    """Install workers and the hub as services of this machine.

    On macOS they run under launchd, on Linux under systemd. They are started again when they end.
    Without --daemon a service belongs to your login. With --daemon it belongs to the machine,
    starts with it, and runs as you; that needs sudo.

    \b
    Examples:
      batchkv service install worker -m MODEL --url-file FILE --dry-run
      sudo .venv/bin/batchkv service install worker --daemon -m MODEL \\
        --url-file FILE
      batchkv service status
      batchkv service uninstall
    """


@service.group()
def install() -> None:
    """Install a service, or install it again with other values. It is (re)started at once."""


def acting_options(command: Callable[..., R]) -> Callable[..., R]:
    """Add the flags of every command that changes services; they come as ``acting`` and more."""
    options = (
        click.option(
            "--daemon", "is_daemon", is_flag=True, help="For the machine, not for your login."
        ),
        click.option("--user", metavar="NAME", help="Run as this user.  [who calls, also by sudo]"),
        click.option(
            "--dry-run", is_flag=True, help="Print the file and the commands. Change nothing."
        ),
        click.option(
            "--system",
            type=click.Choice([MACOS, LINUX]),
            help="Whose files to print, with --dry-run.  [this machine's]",
        ),
    )

    @functools.wraps(command)
    def with_machine(
        *args: Any, user: str | None, dry_run: bool, system: str | None, **kwargs: Any
    ) -> R:
        acting = Acting(_machine(user, system, dry_run), note, dry_run)
        _check_user(acting, kwargs["is_daemon"], user)
        return command(*args, acting=acting, **kwargs)

    wrapped: Callable[..., R] = with_machine
    for option in reversed(options):
        wrapped = option(wrapped)
    return wrapped


def _machine(user: str | None, system: str | None, dry_run: bool) -> Machine:
    found = this_machine(user)
    if system is not None and system != found.system:
        if not dry_run:
            raise UsageError(
                f"--system {system}: this is {found.system}, where --dry-run can show what it does"
            )
        names = {field: getattr(found, field) for field in found.__dataclass_fields__}
        found = Machine(**{**names, "system": system})
    if found.system not in (MACOS, LINUX):
        raise UsageError(f"services need launchd or systemd, which {found.system} does not have")
    return found


def _check_user(acting: Acting, is_daemon: bool, user: str | None) -> None:
    machine = acting.machine
    if user is not None and not is_daemon:
        raise UsageError("--user goes with --daemon: a service of a login is its user's own")
    if acting.is_dry:
        return
    if machine.is_sudo and not is_daemon:
        raise UsageError("without --daemon a service is your own: run this without sudo")
    if is_daemon and machine.user == "root":
        raise UsageError("a daemon must not run as root: use sudo from your account, or --user")


def manager_of(acting: Acting) -> Manager:
    """launchd or systemd."""
    return Launchd(acting) if acting.machine.system == MACOS else Systemd(acting)


def setting_options(command: Callable[..., R]) -> Callable[..., R]:
    """Add the flags of `batchkv worker`; those that were given come as ``arguments``."""

    @functools.wraps(command)
    def with_arguments(*args: Any, **kwargs: Any) -> R:
        values = [(setting, kwargs.pop(setting.name)) for setting in _SETTINGS]
        words: list[str] = []
        for setting, text in values:
            if not text:
                continue
            if setting.value_type is ValueType.ADAPTERS:
                text = [_with_full_path(each) for each in text]
            for each in text if setting.is_repeated else (text,):
                try:
                    checked_setting(setting.name, each)
                except ValueError as fault:
                    raise UsageError(f"{setting.flag} {each}: {fault}") from fault
            words += setting.words(text)
        return command(*args, arguments=tuple(words), **kwargs)

    wrapped: Callable[..., R] = with_arguments
    for setting in reversed(_SETTINGS):
        wrapped = click.option(
            setting.flag, setting.name, help=setting.flag_help(), **setting.option()
        )(wrapped)
    return wrapped


uninstall_option = click.option(
    "--uninstall", "is_removed", is_flag=True, help="Remove it, as `service uninstall` does."
)


@install.command()
@click.option(
    "-m", "--model", "models", multiple=True, help="Model to serve. May be given several times."
)
@click.option(
    "--url-file",
    type=_PATH,
    envvar="BATCHKV_REDIS_URL_FILE",
    help="File with the queue's URL, closed to others.  [BATCHKV_REDIS_URL_FILE]",
)
@click.option("--cache-file", type=_PATH, help="File with the tiers of the cache.  [no cache]")
@click.option("--label", default=WORKER_LABEL, show_default=True, help="Name of the service.")
@uninstall_option
@setting_options
@acting_options
def worker(
    acting: Acting,
    is_daemon: bool,
    models: tuple[str, ...],
    url_file: Path | None,
    cache_file: Path | None,
    label: str,
    is_removed: bool,
    arguments: tuple[str, ...],
) -> None:
    """Serve one model or several. The worker takes the flags of `batchkv worker`.

    The password stays in the file with the URL: the service names the file. One label is one
    worker. With several -m it holds as many of the models as fit into memory together.
    """
    need_label(label)
    if is_removed:
        remove(acting, [label], is_daemon=is_daemon)
        return
    if not models or url_file is None:
        raise UsageError(
            "-m MODEL and --url-file FILE are needed: copy FILE from the hub's secrets/worker.url"
        )
    plan = WorkerPlan(
        models=tuple(map(_model, models)),
        url_file=_absolute(url_file),
        cache_file=None if cache_file is None else _absolute(cache_file),
        label=label,
        arguments=arguments,
        drain_seconds=_drain_seconds(arguments),
    )
    made = worker_service(plan, acting.machine)
    add(acting, made, is_daemon=is_daemon)
    _warn_of_guarded(acting, plan.url_file, plan.cache_file, Path(made.command[0]))


@install.command()
@click.option("--hub", type=_PATH, help="The folder that deploy/hub/setup.sh made.")
@click.option("--cache", "with_cache", is_flag=True, help="The cache's server too.")
@uninstall_option
@acting_options
def hub(
    acting: Acting, is_daemon: bool, hub: Path | None, with_cache: bool, is_removed: bool
) -> None:
    """Run the hub's servers here, with the server program that comes with batchkv."""
    if is_removed:
        remove(acting, list(SERVER_LABELS.values()), is_daemon=is_daemon)
        return
    if hub is None:
        raise UsageError("--hub DIR is needed: the folder that deploy/hub/setup.sh made")
    folder, program = _absolute(hub), find_binary().path
    names = ["queue", "cache"] if with_cache else ["queue"]
    for made in [server_service(name, folder, acting.machine, program) for name in names]:
        add(acting, made, is_daemon=is_daemon)
    _warn_of_guarded(acting, folder, program)


@service.command()
@click.argument("what", type=click.Choice(["worker", "hub"]), required=False)
@click.option("--label", help="The service of this name only.")
@acting_options
def uninstall(acting: Acting, is_daemon: bool, what: str | None, label: str | None) -> None:
    """Stop services and remove them: the worker, the hub's servers, or both.

    A worker gives its jobs back first. Logs, the hub's folder and all results stay.
    """
    labels = {"worker": [WORKER_LABEL], "hub": list(SERVER_LABELS.values())}
    if label is not None:
        if what is not None:
            raise UsageError("give --label, or worker or hub, and not both")
        remove(acting, [need_label(label)], is_daemon=is_daemon)
        return
    names = labels[what] if what else [*labels["worker"], *labels["hub"]]
    remove(acting, names, is_daemon=is_daemon)


@service.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def status(ctx: click.Context, as_json: bool) -> None:
    """Show the services installed here. Exit code 1 if one of them does not run."""
    found = manager_of(Acting(_machine(None, None, False), note)).states()
    if as_json:
        click.echo(json.dumps([asdict(each) for each in found], indent=1))
    elif not found:
        note("no service is installed here")
    else:
        for each in found:
            click.echo(f"{each.label} ({each.kind}): {each.words}; log: {each.log}")
    if not all(each.is_running for each in found):
        ctx.exit(EXIT_NOT_RUNNING)


def add(acting: Acting, made: Service, *, is_daemon: bool) -> None:
    """Install a service, and say what there is to know; a dry run prints its file."""
    manager = manager_of(acting)
    if acting.is_dry:
        click.echo(manager.text(made, is_daemon=is_daemon), nl=False)
    manager.install(made, is_daemon=is_daemon)
    if not acting.is_dry:
        for line in manager.advice(made.label, is_daemon=is_daemon):
            note(f"{made.label}: {line}")


def remove(acting: Acting, labels: list[str], *, is_daemon: bool) -> None:
    """Remove services. Without ``is_daemon`` those of both kinds go, the user's own first."""
    manager = manager_of(acting)
    for label in labels:
        kinds = [True] if is_daemon else [False, True]
        if acting.is_dry:
            kinds = [each for each in kinds if manager.path(label, is_daemon=each).exists()]
            if not kinds:
                kinds = [is_daemon]
                note(f"{label} is not installed here. If it were:")
        found = [kind for kind in kinds if manager.uninstall(label, is_daemon=kind)]
        if not acting.is_dry:
            note(f"{label}: {'removed' if found else 'was not installed'}")


def _model(model: str) -> str:
    try:
        name = model_name(need_plain("--model", model))
    except ValueError as fault:
        raise UsageError(f"--model {model}: {fault}") from fault
    if name.startswith("."):
        raise UsageError(f"--model {model}: a service needs the folder's full path")
    return name


def _with_full_path(adapter: str) -> str:
    """NAME=FOLDER with the folder's full path, because a service starts in another folder."""
    found = parse_adapter(adapter)
    return str(replace(found, folder=str(_absolute(found.path)))) if found.folder else adapter


def _absolute(path: Path) -> Path:
    try:
        return path.expanduser().absolute()
    except RuntimeError:
        raise UsageError(f"{path}: there is no such user") from None


def _drain_seconds(arguments: tuple[str, ...]) -> float:
    flag = BY_NAME["drain_seconds"].flag
    return float(arguments[arguments.index(flag) + 1]) if flag in arguments else 0.0


def _warn_of_guarded(acting: Acting, *paths: Path | None) -> None:
    for path in guarded_places(acting.machine, *(path for path in paths if path is not None)):
        note(f"macOS may keep services from {path}: put it in another folder of your home")


def note(text: str) -> None:
    """A line for people: standard output has the file of a dry run."""
    click.echo(text, err=True)
