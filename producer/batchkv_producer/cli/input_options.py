"""The arguments of commands that read input files, and the lines that they print about them."""

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
from batchkv_producer.intake.prompting import AUTO, Prompting
from batchkv_producer.intake.source import Inputs, ReadAs
from batchkv_producer.intake.spooling import gathered
from batchkv_producer.progress import printable, rows
from batchkv_producer.results.target import STDOUT
from batchkv_producer.submit import submission
from batchkv_producer.submit.submission import Checked, Submitted
from batchkv_producer.wire.batch_options import BatchOptions
from batchkv_producer.wire.job import SamplingParams

R = TypeVar("R")

files_argument = click.argument(
    "files",
    metavar="FILE...",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path, allow_dash=True),
)


def read_as_option(text: str) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """``--as``, with this help. The command gets it as ``read_as``."""
    return click.option(
        "--as",
        "read_as",
        type=click.Choice(["jsonl", "text"]),
        help=f"{text}  [default: .txt is text, the rest JSON]",
    )


@dataclass(frozen=True, slots=True)
class Given:
    """The input files of a command, and how their lines are read and sent."""

    files: tuple[Path, ...]
    read_as: ReadAs | None
    prompting: Prompting = AUTO

    @contextmanager
    def opened(self) -> Iterator[Inputs]:
        """Open the files. Pipes are stored first, so that they can be read several times."""
        with gathered(self.files, self.read_as, say) as inputs:
            yield inputs


def prompting_flags(
    *, raw: str, system: str, rows_may_differ: bool = True
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Add --raw and --system, with these helps, and --no-thinking.

    ``rows_may_differ``: the command has rows with fields of their own. It gets the flags as one
    ``prompting``.
    """

    def add(command: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(command)
        def with_prompting(*args: Any, **kwargs: Any) -> R:
            names = ("raw", "system", "no_thinking")
            prompting = Prompting(*(kwargs.pop(name) for name in names))
            prompting.check()
            return command(*args, prompting=prompting, **kwargs)

        wrapped: Callable[..., R] = click.option(
            "--no-thinking",
            is_flag=True,
            help="Ask the model's chat template for answers without reasoning."
            f"{' Rows may say something else.' if rows_may_differ else ''}",
        )(with_prompting)
        wrapped = click.option("--system", metavar="TEXT", help=system)(wrapped)
        return click.option("--raw", is_flag=True, help=raw)(wrapped)

    return add


def from_file_option(help_text: str) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Add --from FILE, the files that were submitted. The command gets them as ``files``."""
    return click.option(
        "--from",
        "files",
        type=click.Path(path_type=Path, allow_dash=True),
        metavar="FILE",
        multiple=True,
        help=help_text,
    )


def input_options(command: Callable[..., R]) -> Callable[..., R]:
    """Add FILE..., --as and the flags of plain prompts. The command gets them as one ``given``."""

    @functools.wraps(command)
    def with_input(*args: Any, **kwargs: Any) -> R:
        names = ("files", "read_as", "prompting")
        return command(*args, given=Given(*(kwargs.pop(name) for name in names)), **kwargs)

    prompting = prompting_flags(
        raw="Send plain prompts (text lines, and JSON lines with neither url nor body) unchanged, "
        "without the model's chat template.",
        system="A system message before each plain prompt.",
    )
    read_as = read_as_option("Read every line as JSON, or as a prompt.")
    return files_argument(read_as(prompting(with_input)))


def out_of(inputs: Inputs, out: Path | None) -> Path:
    """The file for results: ``out``, else one beside a single input file. A pipe's are printed."""
    if out is not None:
        return out
    if len(inputs.pieces) > 1:
        raise UsageError("several files need one file for results: -o OUT (-o - prints them)")
    origin = inputs.pieces[0].origin
    return origin.with_name(origin.name + ".results.jsonl") if isinstance(origin, Path) else STDOUT


def again_from(given: Given) -> str:
    """The flags with which ``batchkv retry`` queues rows of the same input anew."""
    words = [word for file in given.files for word in ("--from", str(file))]
    words += ["--as", given.read_as] if given.read_as else []
    return f" {shlex.join(words)}"


def say_wrong(found: Checked | Submitted) -> None:
    """Print a line for each of the first wrong rows, and the number of the others."""
    for error in found.errors:
        say(f"{error.place}: {error.code}: {error.message}")
    if num_more := found.num_bad - len(found.errors):
        say(f"{num_more:,} more {'row is' if num_more == 1 else 'rows are'} wrong")


def check_input(
    inputs: Inputs,
    given: Given,
    model: str | None,
    defaults: SamplingParams,
    *,
    options: BatchOptions,
    as_json: bool,
) -> Checked:
    """``--dry-run``: read and check the input, print what was found, change nothing."""
    checked = submission.check(
        inputs,
        model=model,
        defaults=defaults,
        default_model=default_model(),
        dedupe=options.dedupe,
        prompting=given.prompting,
        adapter=options.adapter,
    )
    if as_json:
        print_json(checked)
    else:
        say_wrong(checked)
        if checked.model_note:
            say(checked.model_note)
        click.echo(checked_line(checked))
    return checked


def checked_line(checked: Checked) -> str:
    """The counts of an input, in one line."""
    model = f"model {checked.model}" if checked.model else "no model named"
    num = checked.num_duplicates
    duplicates = f"{rows(num, 'is a duplicate', 'are duplicates')}, " if num else ""
    return printable(
        f"{rows(checked.total)} = {checked.num_jobs:,} good + {checked.num_bad:,} wrong, "
        f"{duplicates}{checked.num_chars:,} characters of prompts, {model}"
    )
