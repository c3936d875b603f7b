"""Prints a report as tables: by rich on a terminal, in plain columns elsewhere."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from itertools import zip_longest

from batchkv_worker.report.results import Report, SchemeReport

NOTE = "float is timed against itself, too: its ratios show how much times vary.\n"
_NONE = "-"
_WIDTH = 80  # of a table in plain columns
_LEAST_WIDTH = 13  # of a column with names
_BREAK = re.compile(r"(?<=[-+, ])")  # where a name may go on in the next line


@dataclass(frozen=True, slots=True)
class _Table:
    title: str
    head: tuple[str, ...]
    lines: list[tuple[str, ...]]


def show(report: Report) -> None:
    """Write the report to standard output."""
    tables = [_bytes(report), _quality(report), _cost(report)]
    if not sys.stdout.isatty():
        sys.stdout.write("\n".join([_heading(report), "", *map(_plain, tables), NOTE]))
        return
    # Imported here, because rich takes 50 ms and is not needed for a file.
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(_heading(report), markup=False)
    for table in tables:
        drawn = Table(title=table.title, title_justify="left")
        for index, name in enumerate(table.head):
            drawn.add_column(name, justify="right" if index >= _num_names(table) else "left")
        for line in table.lines:
            drawn.add_row(*line)
        console.print(drawn)
    console.print(NOTE, markup=False, end="")


def _heading(report: Report) -> str:
    return (
        f"{report.model}: {report.layers}; {report.dtype} on {report.device}, MLX {report.mlx}\n"
        f"text: {report.text}, {report.text_tokens:,} tokens"
    )


def _bytes(report: Report) -> _Table:
    lines: list[tuple[str, ...]] = []
    whole = report.schemes[0].bytes_per_token
    for scheme in report.schemes:
        for index, kind in enumerate(scheme.kinds):
            lines.append(
                (
                    scheme.scheme if index == 0 else "",
                    f"{kind.layers} x {kind.kind}",
                    kind.fitted,
                    f"{kind.bytes_per_token:,.0f}" if kind.bytes_per_token else _NONE,
                    f"{kind.bytes_per_row:,}" if kind.bytes_per_row else _NONE,
                    f"{scheme.bytes_per_token / whole:.3f}x" if index == 0 and whole else "",
                )
            )
    head = ("scheme", "layers", "keeps", "a token", "a row", "to float")
    return _Table("Memory (bytes of a token and of a row)", head, lines)


def _quality(report: Report) -> _Table:
    lines: list[tuple[str, ...]] = []
    for scheme in report.schemes:
        error = scheme.error
        lines.append(
            (
                scheme.scheme,
                _percent(error.mean) if error else _NONE,
                f"{_percent(error.worst)} ({error.worst_layer})" if error else _NONE,
                f"{scheme.quality.perplexity:,.3f}",
                f"{100 * report.perplexity_change(scheme):+.2f} %",
                f"{100 * scheme.quality.same_prediction:.1f} %",
            )
        )
    head = ("scheme", "error", "worst (layer)", "perplexity", "to float", "same token")
    title = f"Quality (error of attention over {report.error_tokens:,} tokens, relative)"
    return _Table(title, head, lines)


def _cost(report: Report) -> _Table:
    lines = [_cost_line(scheme) for scheme in report.schemes]
    head = ("scheme", "path", "step", "to float", "attention", "to float")
    title = f"Decoding {report.decode_rows} rows of {report.decode_tokens:,} tokens (medians; "
    title += "each scheme in turns with float)"
    return _Table(title, head, lines)


def _cost_line(scheme: SchemeReport) -> tuple[str, ...]:
    attention = scheme.attention
    return (
        scheme.scheme,
        ", ".join(scheme.paths) or _NONE,
        f"{scheme.step.milliseconds:.2f} ms",
        f"{scheme.step.ratio:.2f}x",
        f"{attention.milliseconds:.2f} ms" if attention else _NONE,
        f"{attention.ratio:.2f}x" if attention else _NONE,
    )


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %"


def _num_names(table: _Table) -> int:
    """The number of leading columns with names. Numbers follow, aligned to the right."""
    return 3 if table.head[1] == "layers" else 2 if table.head[1] == "path" else 1


def _plain(table: _Table) -> str:
    rows = [table.head, *table.lines]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    names = _num_names(table)
    _narrow(widths, names)
    text = [table.title]
    for row in rows:
        parts = [_wrapped(cell, width) for cell, width in zip(row, widths, strict=True)]
        for line in zip_longest(*parts, fillvalue=""):
            cells = (
                cell.ljust(width) if index < names else cell.rjust(width)
                for index, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            text.append("  ".join(cells).rstrip())
    return "\n".join(text) + "\n"


def _narrow(widths: list[int], names: int) -> None:
    """Make columns of names narrower, the last one first, until the table fits, if it can."""
    excess = sum(widths) + 2 * (len(widths) - 1) - _WIDTH
    for index in reversed(range(names)):
        less = min(max(excess, 0), max(widths[index] - _LEAST_WIDTH, 0))
        widths[index] -= less
        excess -= less


def _wrapped(cell: str, width: int) -> list[str]:
    """The lines of a cell. It is cut where a name has parts."""
    lines = [""]
    for part in _BREAK.split(cell):
        if lines[-1] and len((lines[-1] + part).rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return [line.rstrip() for line in lines]
