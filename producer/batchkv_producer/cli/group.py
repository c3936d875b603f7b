"""The group of all commands. It imports a command when it is called.

It also finds the commands of other packages, and prints errors as one line.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NoReturn

import click
from redis.exceptions import RedisError

from batchkv_producer.cli.exit_codes import (
    EXIT_BROKEN_PIPE,
    EXIT_INTERRUPTED,
    EXIT_OUTPUT,
    EXIT_USAGE,
)
from batchkv_producer.disk import is_full
from batchkv_producer.errors import OLD_INSTALLATION, BatchkvError, ServerError, UsageError
from batchkv_producer.progress import printable

ENTRY_POINT_GROUP = "batchkv.commands"
# Packages that a command needs and the installation for producers does not have.
NEEDED_MODULES: dict[str, tuple[str, ...]]
NEEDED_MODULES = dict.fromkeys(("worker", "kv-report", "bench", "tune"), ("mlx", "mlx_lm"))
NEEDED_MODULES["serve"] = ("starlette", "uvicorn", "python_multipart")
EXTRA = "batchkv[worker]"  # the extra that installs them
EXTRAS = {"serve": "batchkv[gateway]"}  # other commands have other extras


class Cli(click.Group):
    """Lists its own commands in the order of ``places``, then those from entry points."""

    def __init__(self, *args: Any, places: Mapping[str, str], **rest: Any) -> None:
        """``places``: where each own command is, as entry points have it: ``module:name``."""
        super().__init__(*args, **rest)
        self._places = places

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self._places, *sorted(_foreign_commands().keys() - self._places.keys())]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self._places:
            place = EntryPoint(cmd_name, self._places[cmd_name], ENTRY_POINT_GROUP)
            own: click.Command = place.load()
            return own
        found = _foreign_commands().get(cmd_name)
        return _load(cmd_name, found) if found else None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # the reader of the output has ended, like `| head`
            _silence_stdout()
            ctx.exit(EXIT_BROKEN_PIPE)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        def run() -> Any:
            return super(Cli, self).main(
                args, prog_name, complete_var, standalone_mode=False, **extra
            )

        if not standalone_mode:
            return run()
        sys.exit(guarded(run))


def guarded(run: Callable[[], Any]) -> int:
    """Run a command. Returns its exit code. Every known error becomes one line.

    Standard output is flushed here, so that a full disk is reported in one line. If Python flushed
    it at exit, it would print a traceback and exit with 120.
    """
    code = _guarded(run)
    if sys.stdout is None:  # the process was started without it
        return code
    flushed = _guarded(sys.stdout.flush)
    return code or flushed


def _guarded(run: Callable[[], Any]) -> int:
    try:
        code = run()
        return code if isinstance(code, int) else 0
    except click.exceptions.NoArgsIsHelpError as fault:
        fault.show()
        return EXIT_USAGE
    except click.ClickException as fault:
        return _complain(_usage_message(fault), EXIT_USAGE)
    except click.Abort:
        return _complain("interrupted", EXIT_INTERRUPTED)
    except BatchkvError as fault:
        return _complain(str(fault), fault.exit_code)
    except RedisError as fault:
        return _complain(f"Redis: {fault}", ServerError.exit_code)
    except BrokenPipeError:
        _silence_stdout()
        return EXIT_BROKEN_PIPE
    except OSError as fault:
        if fault.filename and is_full(fault):
            return _complain(
                f"the disk is full: cannot write {fault.filename} ({fault.strerror}). Make room "
                "and run the same command again",
                EXIT_OUTPUT,
            )
        where = f"{fault.filename}: " if fault.filename else "cannot write the output: "
        code = _complain(f"{where}{fault.strerror or fault}", EXIT_OUTPUT)
        if not fault.filename:
            _silence_stdout()  # its buffer cannot be written
        return code


def _usage_message(fault: click.ClickException) -> str:
    message = fault.format_message()
    context = fault.ctx if isinstance(fault, click.UsageError) else None
    return (
        f"{message.removesuffix('.')} (see {context.command_path} --help)" if context else message
    )


def _complain(message: str, code: int) -> int:
    click.echo(f"batchkv: {printable(' '.join(message.split()))}", err=True)
    return code


def _silence_stdout() -> None:
    """Discard all further output, so that Python prints no error at exit."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)


def _foreign_commands() -> dict[str, EntryPoint]:
    return {found.name: found for found in entry_points(group=ENTRY_POINT_GROUP)}


def _load(name: str, found: EntryPoint) -> click.Command:
    """The command of an entry point, or a command that names the extra to install."""
    missing = [m for m in NEEDED_MODULES.get(name, ()) if importlib.util.find_spec(m) is None]
    if missing:
        return _Missing(name, missing[0])
    try:
        command = found.load()
    except ImportError as fault:
        if (fault.name or "").startswith("batchkv_"):
            raise UsageError(OLD_INSTALLATION) from fault
        return _Missing(name, fault.name or str(fault))
    if not isinstance(command, click.Command):
        raise BatchkvError(f"the entry point {found.value} of `batchkv {name}` is not a command")
    return command


class _Missing(click.Command):
    """Replaces a command whose dependencies are not installed. It accepts any arguments."""

    def __init__(self, name: str, module: str) -> None:
        extra = EXTRAS.get(name, EXTRA)
        target = "make venv SET=worker" if extra == EXTRA else "make venv"
        message = (
            f"`batchkv {name}` needs {module}: in a clone run `{target}`, elsewhere "
            f"pip install '{extra}'"
        )

        def complain(**_: Any) -> NoReturn:
            raise click.ClickException(message)

        super().__init__(
            name,
            callback=complain,
            help=f"Not installed: pip install '{extra}'.",
            context_settings=_LENIENT,
        )


_LENIENT: MutableMapping[str, Any] = {"ignore_unknown_options": True, "allow_extra_args": True}
