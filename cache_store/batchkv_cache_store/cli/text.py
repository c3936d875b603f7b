"""How the cache's commands print. Nothing that was stored reaches a terminal unchecked."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Sequence
from typing import Any

import click

from batchkv_cache_store.keys import Manifest
from batchkv_cache_store.sizes import shown_size

KEY_DIGITS = 16
NAMESPACE_DIGITS = 12
_MAX_FIELD_CHARACTERS = 40
# C0, DEL, C1, and what turns the direction of writing around.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_DIGEST = re.compile(r"[0-9a-f]{32,}")


class Size(int):
    """A number of bytes, printed with a unit for people and as it is in JSON."""

    @property
    def shown(self) -> str:
        """For people."""
        return shown_size(self)


def say(text: str) -> None:
    """A line for the person at the keyboard: standard error."""
    click.echo(f"batchkv: {printable(text)}", err=True)


def printable(text: str) -> str:
    """The text with control and direction characters spelled out, newlines too."""
    safe = _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
    return safe.encode("utf-8", "backslashreplace").decode("utf-8")


def print_json(value: Any) -> None:
    """Plain values as indented JSON."""
    click.echo(json.dumps(value, ensure_ascii=True, indent=2))


def print_table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Columns as wide as they must be; numbers to the right, "-" for what is not known."""
    table: list[Sequence[object]] = [titles, *rows]
    shown = [[_cell(value) for value in row] for row in table]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    for row, values in zip(shown, table, strict=True):
        cells = [
            text.rjust(width) if isinstance(value, int) else text.ljust(width)
            for text, width, value in zip(row, widths, values, strict=True)
        ]
        click.echo("  ".join(cells).rstrip())


def print_fields(pairs: Iterable[tuple[str, object]]) -> None:
    """One ``name  value`` line each; a value that is None is left out."""
    kept = [(printable(name), _cell(value)) for name, value in pairs if value is not None]
    width = max((len(name) for name, _ in kept), default=0)
    for name, value in kept:
        click.echo(f"{name.ljust(width)}  {value}")


def moment(seconds: float | None) -> str | None:
    """A time of day here; None where it is not known, or none that a calendar has."""
    try:
        here = time.localtime(seconds) if seconds is not None else None
    except (OverflowError, ValueError, OSError):
        here = None
    return time.strftime("%Y-%m-%d %H:%M:%S", here) if here else None


def summary(manifest: Manifest | None) -> str | None:
    """What people know a namespace by: the short fields of its manifest."""
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
    """ "1 block", "1,200 blocks"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, Size):
        return value.shown
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return ", ".join(_cell(item) for item in value)
    return printable(str(value))
