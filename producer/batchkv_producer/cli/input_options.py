"""The arguments of commands that read an input, and what they print about it."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from batchkv_producer.cli.shared import default_model, print_json, say
from batchkv_producer.errors import UsageError
from batchkv_producer.intake.prompting import Prompting
from batchkv_producer.intake.source import Inputs, ReadAs
from batchkv_producer.intake.spooling import gathered
from batchkv_producer.progress import printable, rows
from batchkv_producer.results.target import STDOUT
from batchkv_producer.submit import submission
from batchkv_producer.submit.submission import Checked, Submitted
from batchkv_producer.wire.job import SamplingParams

R = TypeVar("R")

files_argument = click.argument(
    "files",
    metavar="FILE...",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path, allow_dash=True),
)
read_as_option = click.option(
    "--as",
    "read_as",
    type=click.Choice(["jsonl", "text"]),
    help="Read every line as JSON, or as a prompt.  [default: .txt is text, the rest JSON]",
)


_PROMPTING = (
    click.option(
        "--raw",
        is_flag=True,
        help="Send plain prompts (text lines, and JSON lines with neither url nor body) as they "
        "are, without the model's chat template.",
    ),
    click.option("--system", metavar="TEXT", help="A system message before each plain prompt."),
)


@dataclass(frozen=True, slots=True)
class Given:
    """The input that a command was given."""

    files: tuple[Path, ...]
    read_as: ReadAs | None
    prompting: Prompting

    @contextmanager
    def opened(self) -> Iterator[Inputs]:
        """Its files; pipes are there as often as they are read."""
        with gathered(self.files, self.read_as, say) as inputs:
            yield inputs


def prompting_options(command: Callable[..., R]) -> Callable[..., R]:
    """Add --raw and --system; the command gets them as one ``prompting``."""

    @functools.wraps(command)
    def with_prompting(*args: Any, **kwargs: Any) -> R:
        prompting = Prompting(kwargs.pop("raw"), kwargs.pop("system"))
        prompting.check()
        return command(*args, prompting=prompting, **kwargs)

    wrapped: Callable[..., R] = with_prompting
    for option in reversed(_PROMPTING):
        wrapped = option(wrapped)
    return wrapped


def input_options(command: Callable[..., R]) -> Callable[..., R]:
    """Add FILE..., --as, --raw and --system; the command gets them as one ``given``."""

    @functools.wraps(command)
    def with_input(*args: Any, **kwargs: Any) -> R:
        names = ("files", "read_as", "prompting")
        return command(*args, given=Given(*(kwargs.pop(name) for name in names)), **kwargs)

    return files_argument(read_as_option(prompting_options(with_input)))


def out_of(inputs: Inputs, out: Path | None) -> Path:
    """Where results go: where the user says, else beside one file; those of a pipe are printed."""
    if out is not None:
        return out
    if len(inputs.pieces) > 1:
        raise UsageError("several files need a place for their results: -o OUT (-o - prints them)")
    origin = inputs.pieces[0].origin
    return origin.with_name(origin.name + ".results.jsonl") if isinstance(origin, Path) else STDOUT


def again_from(given: Given) -> str:
    """What ``batchkv retry`` is given to make rows of the same input anew."""
    words = [word for file in given.files for word in ("--from", str(file))]
    words += ["--as", given.read_as] if given.read_as else []
    return f" {shlex.join(words)}"


def tell_wrong(found: Checked | Submitted) -> None:
    """A line for each of the first rows that are wrong."""
    for error in found.errors:
        say(f"{error.place}: {error.code}: {error.message}")
    if found.num_bad > len(found.errors):
        say(f"and {rows(found.num_bad - len(found.errors))} more that are wrong")


def tell_checked(
    inputs: Inputs,
    given: Given,
    model: str | None,
    defaults: SamplingParams,
    *,
    dedupe: bool,
    as_json: bool,
) -> Checked:
    """``--dry-run``: read and check, change nothing."""
    checked = submission.check(
        inputs,
        model=model,
        defaults=defaults,
        default_model=default_model(),
        dedupe=dedupe,
        prompting=given.prompting,
    )
    if as_json:
        print_json(checked)
    else:
        tell_wrong(checked)
        if checked.model_note:
            say(checked.model_note)
        click.echo(checked_line(checked))
    return checked


def checked_line(checked: Checked) -> str:
    """What a file holds, in one line."""
    model = f"model {checked.model}" if checked.model else "no model named"
    duplicates = f"{rows(checked.num_duplicates)} as another, " if checked.num_duplicates else ""
    return printable(
        f"{rows(checked.total)} = {checked.num_jobs:,} good + {checked.num_bad:,} wrong, "
        f"{duplicates}{checked.num_chars:,} characters of prompts, {model}"
    )
