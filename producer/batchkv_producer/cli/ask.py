"""``batchkv ask``: one question, one answer."""

from __future__ import annotations

import sys
from functools import partial

import click

from batchkv_producer.cli.batch_options import adapter_option
from batchkv_producer.cli.input_options import prompting_flags
from batchkv_producer.cli.shared import (
    default_model,
    generation_flags,
    json_option,
    redis_url_option,
    say,
    session,
)
from batchkv_producer.client import StoredRow
from batchkv_producer.errors import UsageError
from batchkv_producer.intake.formats import MAX_LINE_BYTES
from batchkv_producer.intake.prompting import Prompting
from batchkv_producer.local import ask as asking
from batchkv_producer.progress import Reporter, printable, reporter
from batchkv_producer.results import outfile, output
from batchkv_producer.server.embedded import ensure_running
from batchkv_producer.server.home import home_from_environment
from batchkv_producer.wire.adapter import Adapter
from batchkv_producer.wire.job import Result, SamplingParams


@click.command()
@click.argument("prompt")
@click.option("-m", "--model", metavar="MODEL", help="The model to ask.  [default: BATCHKV_MODEL]")
@adapter_option(
    "only a worker whose adapter has the same files answers, and one that is started serves it."
)
@prompting_flags(
    raw="Send the prompt unchanged, without the model's chat template.",
    system="A system message before the prompt.",
    rows_may_differ=False,
)
@generation_flags("", seed="The seed of the answer. Without it each question gets its own.")
@redis_url_option
@json_option
@click.pass_context
def ask(
    ctx: click.Context,
    prompt: str,
    model: str | None,
    adapter: Adapter | None,
    prompting: Prompting,
    defaults: SamplingParams,
    url: str | None,
    as_json: bool,
) -> None:
    """Ask one question, print its answer as it is made. PROMPT - reads standard input.

    Nothing is kept. The question runs before all other work of the model. If no worker serves the
    model, one is started here and ends after the answer. For many questions start `batchkv worker`
    first. Exit code 1 if there is no answer: standard error says why.

    \b
    Examples:
      batchkv ask -m mlx-community/Qwen3-4B-4bit "What is a prefix cache?"
      batchkv ask -m MODEL --system "Use one word." "Which colour is the sky?"
      git diff | batchkv ask -m MODEL --system "Review this." -
    """
    chosen = model or default_model()
    if not chosen:
        raise UsageError("no model: name one with -m MODEL or BATCHKV_MODEL")
    question = asking.Question(_text(prompt), chosen, defaults, prompting, adapter=adapter)
    with session(url) as opened, reporter() as progress:
        home = home_from_environment() if opened.is_embedded else None
        revive = partial(ensure_running, home) if home else None
        printer = _Printer(progress)
        row = asking.ask(
            *(opened.client, opened.connection, opened.url, question, progress),
            revive=revive,
            on_piece=(lambda _: None) if as_json else printer.add,
        )
    ctx.exit(_print_row(row, as_json, printer))


def _text(prompt: str) -> str:
    """The prompt. From standard input without newlines at its end, like a shell's ``$(..)``."""
    if prompt != "-":
        return prompt
    if sys.stdin is None:
        raise UsageError("standard input is closed: give the prompt as an argument, or pipe it in")
    if sys.stdin.isatty():
        say("reading the prompt from the terminal: end it with Ctrl-D on a line of its own")
    try:
        return sys.stdin.buffer.read(MAX_LINE_BYTES + 1).decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError:
        raise UsageError("the prompt on standard input is not UTF-8 text") from None


class _Printer:
    """Prints the answer piece by piece, without the newlines at its end."""

    def __init__(self, progress: Reporter | None = None) -> None:
        self._progress = progress
        self._newlines = ""  # that are not printed yet
        self.num_chars = 0  # printed or held back

    def add(self, piece: str) -> None:
        """Print a piece. The first one ends the display of progress."""
        if not self.num_chars and self._progress is not None:
            self._progress.__exit__()
        self.num_chars += len(piece)
        text = self._newlines + piece
        printed = text.rstrip("\n")
        self._newlines = text[len(printed) :]
        if printed:
            _write(printed, end="")

    def end(self, text: str = "") -> None:
        """End the line, after what is left of the text."""
        self._newlines = self._newlines if text[self.num_chars :].strip("\n") else ""
        _write(self._newlines + text[self.num_chars :].rstrip("\n"))


def _print_row(row: StoredRow, as_json: bool, printer: _Printer | None = None) -> int:
    """Print the answer, or what is left of it. Returns the exit code."""
    result = row.result
    if as_json:
        _write(output.output_line(row.job_id, result))
    elif result.outcome == "ok":
        (printer or _Printer()).end(result.text)
    elif printer is not None and printer.num_chars:
        printer.end()
    if result.outcome != "ok":
        code, message = result.error or (result.outcome, "the question was canceled")
        say(f"no answer: {code}: {message}")
        return 1
    if result.finish_reason == "length":
        say(_why_cut(result))
    return 0


def _why_cut(result: Result) -> str:
    num = result.usage.completion
    if result.reasoning and not result.text:
        return (
            f"the reasoning alone took {num:,} tokens: --max-tokens N allows more, and "
            "--thinking-budget N ends the reasoning earlier"
        )
    return f"the answer was cut after {num:,} tokens: --max-tokens N allows more"


def _write(text: str, end: str = "\n") -> None:
    raw = outfile.encoded(printable(text) if sys.stdout.isatty() else text)
    raw = raw if end else raw.removesuffix(b"\n")
    sys.stdout.buffer.write(raw)
    sys.stdout.buffer.flush()
