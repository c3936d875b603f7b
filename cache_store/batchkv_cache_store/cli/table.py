"""Tables that fit the terminal, or 80 columns without one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import click

from batchkv_cache_store.cli.text import cell, output_width

GAP = "  "
_CUT = ".."  # in place of characters that were left out


def first_digits(text: str, width: int) -> str:
    """The first digits of a key or a namespace, which commands accept in place of all."""
    return text[:width]


def without_middle(text: str, width: int) -> str:
    """The beginning and the end of a text, in at most ``width`` characters."""
    if len(text) <= width:
        return text
    num_kept = max(0, width - len(_CUT))
    num_last = num_kept // 2
    return text[: num_kept - num_last] + _CUT[:width] + text[len(text) - num_last :]


@dataclass(frozen=True, slots=True)
class Column:
    """One column: a title, and a value for each row.

    ``shorten`` makes texts fit a width; such a column may become as narrow as ``min_width``. If a
    table is still too wide, columns with ``drop`` above 0 are left out, the lowest number first.
    With ``if_any``, the column is shown only if a value is not 0, "" or None.
    """

    title: str
    values: Sequence[object]
    shorten: Callable[[str, int], str] | None = None
    min_width: int = 0
    drop: int = 0
    if_any: bool = False

    @property
    def width(self) -> int:
        """The width that shows the title and all values in full."""
        return max(map(len, (self.title, *map(cell, self.values))))

    @property
    def spare(self) -> int:
        """The characters by which shortening can make it narrower."""
        least = max(self.min_width, len(self.title))
        return max(0, self.width - least) if self.shorten is not None else 0

    def lines(self, width: int) -> list[str]:
        """Title and values, padded to ``width``; numbers are aligned to the right."""
        known = [value for value in self.values if value is not None]
        is_number = bool(known) and all(isinstance(value, int) for value in known)
        texts = [self.title, *map(cell, self.values)]
        if self.shorten is not None:
            texts = [self.shorten(text, width) for text in texts]
        return [text.rjust(width) if is_number else text.ljust(width) for text in texts]


def table_lines(columns: Iterable[Column], width: int) -> list[str]:
    """The line of titles, and one line for each row."""
    shown = [column for column in columns if not column.if_any or any(column.values)]
    while _excess(shown, width) > sum(column.spare for column in shown):
        droppable = [column.drop for column in shown if column.drop]
        if not droppable:
            break
        shown = [column for column in shown if column.drop != min(droppable)]
    lines = [column.lines(size) for column, size in zip(shown, _sizes(shown, width), strict=True)]
    return [GAP.join(cells).rstrip() for cells in zip(*lines, strict=True)]


def _excess(columns: Sequence[Column], width: int) -> int:
    """How many characters the columns, in full, are wider than ``width``."""
    return sum(column.width for column in columns) + len(GAP) * (len(columns) - 1) - width


def _sizes(columns: Sequence[Column], width: int) -> list[int]:
    """The width of each column, after the one with most spare characters was cut, repeatedly."""
    sizes, spares = [column.width for column in columns], [column.spare for column in columns]
    for _ in range(min(_excess(columns, width), sum(spares))):
        place = spares.index(max(spares))
        sizes[place] -= 1
        spares[place] -= 1
    return sizes


def print_table(columns: Iterable[Column]) -> None:
    """Print the table in the width of the output."""
    for line in table_lines(columns, output_width()):
        click.echo(line)
