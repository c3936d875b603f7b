"""Tables and lists of fields that fit the terminal, or 80 columns without one."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import click

from batchkv_producer.progress import printable

DEFAULT_WIDTH = 80
MIN_WIDTH = 40
GAP = "  "
CUT = ".."  # stands for what was left out

NO_BREAK = "\x00"  # printable() has left none of these

_COMMAND = re.compile("`[^`]*`")

Shorten = Callable[[str, int], str]


def width() -> int:
    """Columns of the terminal; 80 for a pipe or a file."""
    if not sys.stdout.isatty():
        return DEFAULT_WIDTH
    return max(MIN_WIDTH, shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns)


def cell(value: object) -> str:
    """A value as it stands in a table."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.1f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, list | tuple | set | frozenset):
        return ", ".join(cell(item) for item in value)
    return printable(str(value)).replace("\n", "\\n")


def shorten_middle(text: str, limit: int) -> str:
    """The text in at most ``limit`` characters: its beginning and its end."""
    if len(text) <= limit:
        return text
    num_kept = max(0, limit - len(CUT))
    end = text[len(text) - num_kept // 2 :] if num_kept > 1 else ""
    return text[: num_kept - num_kept // 2] + CUT[:limit] + end


def shorten_model(text: str, limit: int) -> str:
    """A model's name in at most ``limit`` characters: without its owner or folder at first."""
    if len(text) > limit:
        text = text.rstrip("/").rpartition("/")[2]
    return shorten_middle(text, limit)


@dataclass(frozen=True, slots=True)
class Column:
    """One column: a title and a value for each row.

    With ``shorten`` it may become as narrow as ``min_width``. A column with ``drop`` above 0 is
    left out when the table does not fit otherwise, the lowest number first; one ``if_any`` when
    it says nothing (0 or "" in all rows).
    """

    title: str
    values: Sequence[object]
    shorten: Shorten | None = None
    min_width: int = 8
    drop: int = 0
    if_any: bool = False


def fitted(columns: Iterable[Column], limit: int) -> list[tuple[Column, int]]:
    """The columns that are shown, and how wide each is."""
    shown = [column for column in columns if not column.if_any or any(column.values)]
    while True:
        widths = [_natural(column) for column in shown]
        over = sum(widths) + len(GAP) * (len(shown) - 1) - limit
        while over > 0:
            slack, place = max(
                (size - max(each.min_width, len(each.title)) if each.shorten else 0, index)
                for index, (each, size) in enumerate(zip(shown, widths, strict=True))
            )
            if slack <= 0:
                break
            widths[place] -= 1
            over -= 1
        droppable = [column for column in shown if column.drop]
        if over <= 0 or not droppable:
            return list(zip(shown, widths, strict=True))
        least = min(column.drop for column in droppable)
        shown = [column for column in shown if column.drop != least]


def _natural(column: Column) -> int:
    return max(map(len, (column.title, *map(cell, column.values))))


def table_lines(columns: Iterable[Column], limit: int | None = None) -> list[str]:
    """The title line and one line for each row; numbers to the right."""
    shown = fitted(columns, limit or width())
    num_rows = max((len(column.values) for column, _ in shown), default=0)
    is_number = [_is_number(column) for column, _ in shown]  # looks at all values: once
    pairs = zip(shown, is_number, strict=True)
    titles = [_padded(column.title, size, right) for (column, size), right in pairs]
    lines = [GAP.join(titles).rstrip()]
    for row in range(num_rows):
        cells = []
        for (column, size), right in zip(shown, is_number, strict=True):
            text = cell(column.values[row])
            text = column.shorten(text, size) if column.shorten else text
            cells.append(_padded(text, size, right))
        lines.append(GAP.join(cells).rstrip())
    return lines


def _is_number(column: Column) -> bool:
    values = [value for value in column.values if value is not None]
    return bool(values) and all(isinstance(value, int | float) for value in values)


def _padded(text: str, size: int, is_number: bool) -> str:
    return text.rjust(size) if is_number else text.ljust(size)


def print_table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Columns as wide as they must be; numbers to the right."""
    values = list(zip(*rows, strict=True)) or [()] * len(titles)
    columns = [Column(title, each) for title, each in zip(titles, values, strict=True)]
    click.echo("\n".join(table_lines(columns)))


def print_fields(pairs: Iterable[tuple[str, object]]) -> None:
    """One ``name  value`` line each, long ones folded; a value that is None is left out."""
    kept = [(name, cell(value)) for name, value in pairs if value is not None]
    name_width = max((len(name) for name, _ in kept), default=0)
    indent = " " * (name_width + len(GAP))
    for name, value in kept:
        room = max(20, width() - len(indent))
        lines = [value]
        if len(value) > room:
            # A command stays on one line, so that it can be copied.
            whole = _COMMAND.sub(lambda found: found[0].replace(" ", NO_BREAK), value)
            lines = textwrap.wrap(whole, room, break_on_hyphens=False)
            lines = [line.replace(NO_BREAK, " ") for line in lines]
        click.echo(f"{name.ljust(name_width)}{GAP}" + f"\n{indent}".join(lines))
