"""``--watch``: repeats a command's output every few seconds."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout

import click

from batchkv_producer.errors import UsageError
from batchkv_producer.retry import read_with_retry

WATCH_SECONDS = 2.0
_CLEAR = "\x1b[H\x1b[J"  # to the upper left corner, and nothing below it

watch_option = click.option(
    "--watch", "is_watching", is_flag=True, help="Repeat every 2 seconds, until Ctrl-C."
)


def shown(show: Callable[[], bool], *, is_watching: bool, as_json: bool) -> None:
    """Call ``show`` once, or with ``--watch`` until it says that there is no more to come.

    On a terminal each screen replaces the one before; elsewhere an empty line stands between.
    """
    if not is_watching:
        show()
        return
    if as_json:
        raise UsageError("--watch is for people: without it, --json can be asked for repeatedly")
    is_terminal, is_first = sys.stdout.isatty(), True
    while True:
        text, is_over = read_with_retry(lambda: _captured(show))
        if is_terminal:
            text = _CLEAR + text
        elif not is_first:
            text = "\n" + text
        click.echo(text, nl=False)
        sys.stdout.flush()
        is_first = False
        if is_over:
            return
        time.sleep(WATCH_SECONDS)


class _Screen(io.StringIO):
    """Keeps what is written, and is a terminal if standard output is, for the width's sake."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def _captured(show: Callable[[], bool]) -> tuple[str, bool]:
    screen = _Screen(is_terminal=sys.stdout.isatty())
    with redirect_stdout(screen):
        is_over = show()
    return screen.getvalue(), is_over
