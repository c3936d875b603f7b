"""Prints texts, fields and JSON for the cache's commands.

Texts from stored data are printed without control characters.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable
from typing import Any

import click

from batchkv_cache_store.keys import Manifest
from batchkv_cache_store.sizes import shown_size

KEY_DIGITS = 16
NAMESPACE_DIGITS = 12
DEFAULT_WIDTH = 80
MIN_WIDTH = 40
_MAX_FIELD_CHARACTERS = 40
# C0, DEL, C1, and characters that change the direction of writing.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_DIGEST = re.compile(r"[0-9a-f]{32,}")


class Size(int):
    """A number of bytes: tables show it with a unit, JSON as a plain number."""

    @property
    def shown(self) -> str:
        """The size with a unit."""
        return shown_size(self)


def say(text: str) -> None:
    """Print a line for the user on standard error."""
    click.echo(f"batchkv: {printable(text)}", err=True)


def printable(text: str) -> str:
    """The text with control characters, newlines and direction characters as escapes."""
    safe = _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
    return safe.encode("utf-8", "backslashreplace").decode("utf-8")


def print_json(value: Any) -> None:
    """Print plain values as indented JSON."""
    click.echo(json.dumps(value, ensure_ascii=True, indent=2))


def output_width() -> int:
    """Columns of the terminal; 80 for a pipe or a file."""
    if not sys.stdout.isatty():
        return DEFAULT_WIDTH
    return max(MIN_WIDTH, shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns)


def print_fields(pairs: Iterable[tuple[str, object]]) -> None:
    """Print one ``name  value`` line each, without values that are None; long lines are folded."""
    kept = [(printable(name), cell(value)) for name, value in pairs if value is not None]
    width = max((len(name) for name, _ in kept), default=0)
    for name, value in kept:
        first, *others = folded(value, width + 2) or [""]
        click.echo(f"{name.ljust(width)}  {first.lstrip()}".rstrip())
        for line in others:
            click.echo(line)


def folded(text: str, indent: int) -> list[str]:
    """The text in indented lines that fit the output; words are not broken."""
    return textwrap.wrap(
        text,
        max(output_width(), indent + MIN_WIDTH // 2),
        initial_indent=" " * indent,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def moment(seconds: float | None, layout: str = "%Y-%m-%d %H:%M:%S") -> str | None:
    """A local time as a text; None if it is unknown or outside of the calendar."""
    try:
        local = time.localtime(seconds) if seconds is not None else None
    except (OverflowError, ValueError, OSError):
        local = None
    return time.strftime(layout, local) if local else None


def summary(manifest: Manifest | None) -> str | None:
    """The short fields of a namespace's manifest, by which people know it."""
    if manifest is None:
        return None
    fields = (
        (name, str(value))
        for name, value in sorted(manifest.items())
        if not isinstance(value, list) and not _DIGEST.fullmatch(str(value))
    )
    short = (f"{name}={text}" for name, text in fields if len(text) <= _MAX_FIELD_CHARACTERS)
    return " ".join(short) or None


def count(number: int, noun: str) -> str:
    """A number with its noun, for example "1 block" or "1,200 blocks"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def cell(value: object) -> str:
    """A value as a text for a table; "-" for None."""
    if value is None:
        return "-"
    if isinstance(value, Size):
        return value.shown
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return ", ".join(cell(item) for item in value)
    return printable(str(value))
