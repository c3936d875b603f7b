"""Prints tables and lists of fields that fit the terminal, or 80 columns without one."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import click

from batchkv_producer.progress import printable

DEFAULT_WIDTH = 80
MIN_WIDTH = 40
MAX_CUTS = 8  # tries to cut texts so that they differ
GAP = "  "
CUT = ".."  # in place of the characters that were left out

NO_BREAK = "\x00"  # a character that printable() never leaves in a text

_COMMAND = re.compile("`[^`]*`")

Shorten = Callable[[Sequence[str], int], list[str]]


def width() -> int:
    """Columns of the terminal; 80 for a pipe or a file."""
    if not sys.stdout.isatty():
        return DEFAULT_WIDTH
    return max(MIN_WIDTH, shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns)


def cell(value: object) -> str:
    """A value as text for a table."""
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
    """A model's name in at most ``limit`` characters, or names between commas. Their owners or
    folders are left out first."""
    if len(text) > limit:
        text = ", ".join(name.rstrip("/").rpartition("/")[2] for name in text.split(", "))
    return shorten_middle(text, limit)


def shorten_names(texts: Sequence[str], limit: int) -> list[str]:
    """Each text in at most ``limit`` characters. Different texts stay different where they can."""
    return _apart(texts, limit, shorten_middle)


def shorten_models(texts: Sequence[str], limit: int) -> list[str]:
    """The same for names of models."""
    return _apart(texts, limit, shorten_model)


def _apart(texts: Sequence[str], limit: int, shorten: Callable[[str, int], str]) -> list[str]:
    """Shorten each text. Texts that would look alike are cut where they differ instead."""
    short = {text: shorten(text, limit) for text in dict.fromkeys(texts)}
    for _ in range(MAX_CUTS):
        alike = defaultdict[str, list[str]](list)
        for text, shown in short.items():
            alike[shown].append(text)
        groups = [group for group in alike.values() if len(group) > 1]
        if not groups:
            break
        taken = Counter(short.values())
        for group in groups:
            taken.subtract(short[text] for text in group)
            short |= _cut_apart(group, limit, taken)
            taken.update(short[text] for text in group)
    return [short[text] for text in texts]


def _cut_apart(group: Sequence[str], limit: int, taken: Counter[str]) -> dict[str, str]:
    """Texts of a group, each cut at its end, so that it can be read, if they differ then from each
    other and from what is taken; else cut before the part in which they differ."""
    heads = {text: _cut_end(text, limit) for text in group}
    if len(set(heads.values())) == len(group) and not any(taken[one] for one in heads.values()):
        return heads
    pairs = zip(min(group), max(group), strict=False)
    start = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return {text: _cut_before(text, start, limit) for text in group}


def _cut_end(text: str, limit: int) -> str:
    """The text in at most ``limit`` characters: its beginning."""
    return text if len(text) <= limit else text[: max(0, limit - len(CUT))] + CUT[:limit]


def _cut_before(text: str, start: int, limit: int) -> str:
    """The text in at most ``limit`` characters, those from ``start`` on among them."""
    num_head = min(start, max(0, limit - len(CUT)) // 3)
    room = limit - num_head - len(CUT)
    if start <= num_head or room <= 0:
        return _cut_end(text, limit)
    tail = text[min(start, len(text) - room) :]
    if len(tail) > room:
        tail = tail[: max(1, room - len(CUT))] + CUT[: room - 1]
    return text[:num_head] + CUT + tail


@dataclass(frozen=True, slots=True)
class Column:
    """One column: a title and a value for each row.

    With ``shorten`` the column may become as narrow as ``min_width``. If the table still does not
    fit, columns with a ``drop`` above 0 are left out, the lowest number first. A column with
    ``if_any`` is left out if all its values are 0 or "".
    """

    title: str
    values: Sequence[object]
    shorten: Shorten | None = None
    min_width: int = 8
    drop: int = 0
    if_any: bool = False


def fitted(columns: Iterable[Column], limit: int) -> list[tuple[Column, int]]:
    """The columns that fit into ``limit`` characters, and the width of each."""
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
    """The title line and one line for each row. Numbers are aligned to the right."""
    shown = fitted(columns, limit or width())
    num_rows = max((len(column.values) for column, _ in shown), default=0)
    cells = [_cells(column, size) for column, size in shown]
    return [GAP.join(each[row] for each in cells).rstrip() for row in range(num_rows + 1)]


def _cells(column: Column, size: int) -> list[str]:
    """The title and all values of a column, padded to its width."""
    texts = [cell(value) for value in column.values]
    texts = column.shorten(texts, size) if column.shorten else texts
    is_number = _is_number(column)
    return [_padded(text, size, is_number) for text in (column.title, *texts)]


def _is_number(column: Column) -> bool:
    values = [value for value in column.values if value is not None]
    return bool(values) and all(isinstance(value, int | float) for value in values)


def _padded(text: str, size: int, is_number: bool) -> str:
    return text.rjust(size) if is_number else text.ljust(size)


def print_table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print columns that are as wide as their longest value. Numbers are aligned to the right."""
    values = list(zip(*rows, strict=True)) or [()] * len(titles)
    columns = [Column(title, each) for title, each in zip(titles, values, strict=True)]
    click.echo("\n".join(table_lines(columns)))


def print_fields(pairs: Iterable[tuple[str, object]]) -> None:
    """Print one ``name  value`` line each. Long values are folded; None is left out."""
    kept = [(name, cell(value)) for name, value in pairs if value is not None]
    name_width = max((len(name) for name, _ in kept), default=0)
    indent = " " * (name_width + len(GAP))
    for name, value in kept:
        room = max(20, width() - len(indent))
        lines = [value]
        if len(value) > room:
            # A command is not folded, so that it can be copied.
            whole = _COMMAND.sub(lambda found: found[0].replace(" ", NO_BREAK), value)
            lines = textwrap.wrap(whole, room, break_on_hyphens=False)
            lines = [line.replace(NO_BREAK, " ") for line in lines]
        click.echo(f"{name.ljust(name_width)}{GAP}" + f"\n{indent}".join(lines))
