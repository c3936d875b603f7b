"""Charts as SVG: columns, lines over time, bars, and a divided bar.

Each chart has a title and a description for screen readers. Colours, fonts and dashes come from
classes (``style.CHART_CSS``), so a chart suits light and dark, and needs no ``style`` attribute.
Series differ by their dashes, too. All text is escaped. ``data_table`` shows the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from batchkv_producer.report.words import per_cent, safe, short_number

WIDTH, HEIGHT = 480, 240
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 26, 40
BAR_HEIGHT = 34
NUM_COLORS = 6  # classes s1 to s6
MAX_LABELS = 5
MAX_NAME_CHARS = 44
_TIME_STEPS = (
    1,
    2,
    5,
    10,
    15,
    30,
    60,
    120,
    300,
    600,
    900,
    1800,
    3600,
    7200,
    10_800,
    21_600,
    43_200,
)
DAY_SECONDS = 86_400


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a histogram. ``low`` and ``high`` are the labels of its edges."""

    low: str
    high: str
    value: float


@dataclass(frozen=True, slots=True)
class Line:
    """A curve: (seconds since 1970, value) in the order of time. None ends it: a gap follows."""

    name: str
    points: Sequence[tuple[float, float | None]]


@dataclass(frozen=True, slots=True)
class Part:
    """A bar, or a part of a divided bar. ``label`` is the text of its value."""

    name: str
    value: float
    label: str


def column_chart(title: str, about: str, unit: str, columns: Sequence[Column]) -> str:
    """A histogram. ``unit`` names the values of the horizontal axis."""
    highest = max((column.value for column in columns), default=0.0)
    parts = list(_grid(highest, "rows"))
    width = (WIDTH - LEFT - RIGHT) / max(1, len(columns))
    every = -(-(len(columns) + 1) // MAX_LABELS)
    for number, column in enumerate(columns):
        at = LEFT + number * width
        top = _height(column.value, highest)
        tip = f"{column.low} to {column.high} {unit}: {column.value:,.0f} rows"
        parts.append(
            f'<rect class="s1" x="{at + 1:.1f}" y="{top:.1f}" width="{max(1.0, width - 2):.1f}" '
            f'height="{HEIGHT - BOTTOM - top:.1f}"><title>{safe(tip)}</title></rect>'
        )
        if number % every == 0:
            parts.append(_text(at, HEIGHT - BOTTOM + 17, column.low, "middle"))
    if columns and len(columns) % every == 0:
        parts.append(_text(WIDTH - RIGHT, HEIGHT - BOTTOM + 17, columns[-1].high, "end"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, unit, "middle"))
    return _svg(title, about, HEIGHT, parts)


def time_chart(title: str, about: str, unit: str, lines: Sequence[Line]) -> str:
    """Curves over a common time. ``unit`` names their values. The time is in UTC."""
    times = [at for line in lines for at, _ in line.points]
    first, last = min(times, default=0.0), max(times, default=1.0)
    last = max(last, first + 1)
    values = [value for line in lines for _, value in line.points if value is not None]
    highest = max(values, default=0.0)
    parts = list(_grid(highest, unit))

    def place(at: float) -> float:
        return LEFT + (at - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    for at, label in _time_labels(first, last):
        x = place(at)
        bottom = HEIGHT - BOTTOM
        parts.append(
            f'<line class="grid" x1="{x:.1f}" y1="{bottom}" x2="{x:.1f}" y2="{bottom + 4}"/>'
        )
        parts.append(_text(x, bottom + 17, label, "middle"))
    for number, line in enumerate(lines):
        for stretch in _stretches(line.points):
            path = " ".join(f"{place(at):.1f},{_height(v, highest):.1f}" for at, v in stretch)
            if len(stretch) == 1:
                dot_x, dot_y = path.split(",")
                color = _color(number)
                parts.append(f'<circle class="{color}" cx="{dot_x}" cy="{dot_y}" r="2.5"/>')
            else:
                parts.append(f'<polyline class="line {_color(number)}" points="{path}"/>')
    day = _moment(first).strftime("%d %B %Y")
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, f"UTC, from {day}", "middle"))
    return _svg(title, about, HEIGHT, parts)


def bar_chart(title: str, about: str, bars: Sequence[Part]) -> str:
    """A horizontal bar for each part, with its name above it."""
    highest = max((bar.value for bar in bars), default=0.0)
    parts = []
    for number, bar in enumerate(bars):
        at = number * BAR_HEIGHT
        width = (WIDTH - 2) * bar.value / highest if highest > 0 else 0.0
        parts.append(_text(0, at + 14, _cut(bar.name), "start"))
        parts.append(_text(WIDTH, at + 14, bar.label, "end", "value"))
        parts.append(f'<rect class="track" x="0" y="{at + 19}" width="{WIDTH}" height="8" rx="2"/>')
        parts.append(
            f'<rect class="s1" x="0" y="{at + 19}" width="{max(1.0, width):.1f}" height="8" '
            f'rx="2"/>'
        )
    return _svg(title, about, max(1, len(bars)) * BAR_HEIGHT, parts)


def share_chart(title: str, about: str, parts: Sequence[Part]) -> str:
    """One bar that is divided into parts, with a legend below it."""
    total = sum(part.value for part in parts)
    shapes, at = [], 0.0
    for number, part in enumerate(parts):
        width = WIDTH * part.value / total if total > 0 else 0.0
        shapes.append(
            f'<rect class="part {_color(number)}" x="{at:.1f}" y="0" width="{width:.1f}" '
            f'height="26"/>'
        )
        top = 40 + number * 22
        shapes.append(f'<rect class="{_color(number)}" x="0" y="{top}" width="12" height="12"/>')
        shapes.append(_text(20, top + 11, _cut(part.name), "start"))
        label = f"{part.label}, {per_cent(part.value, total)}"
        shapes.append(_text(WIDTH, top + 11, label, "end", "value"))
        at += width
    return _svg(title, about, 40 + 22 * max(1, len(parts)), shapes)


def legend(names: Sequence[str]) -> str:
    """The names of a chart's curves, each after a piece of its line. HTML."""
    items = "".join(
        f'<li><svg class="key" viewBox="0 0 28 8" aria-hidden="true">'
        f'<polyline class="line {_color(number)}" points="0,4 28,4"/></svg> {safe(name)}</li>'
        for number, name in enumerate(names)
    )
    return f'<ul class="legend">{items}</ul>'


def data_table(
    caption: str, titles: Sequence[str], rows: Sequence[Sequence[str]], *, num_texts: int = 1
) -> str:
    """A table with the numbers of a chart. The first ``num_texts`` columns are aligned left."""
    kinds = ["text" if place < num_texts else "number" for place in range(len(titles))]
    head = "".join(
        f'<th scope="col" class="{kind}">{safe(title)}</th>'
        for kind, title in zip(kinds, titles, strict=True)
    )
    lines = []
    for row in rows:
        first, *others = row
        cells = "".join(
            f'<td class="{kind}">{safe(cell)}</td>'
            for kind, cell in zip(kinds[1:], others, strict=True)
        )
        lines.append(f'<tr><th scope="row" class="{kinds[0]}">{safe(first)}</th>{cells}</tr>')
    return (
        f'<div class="scroll" role="region" aria-label="{safe(caption)}" tabindex="0"><table>'
        f"<caption>{safe(caption)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def step_curve(stretches: Iterable[tuple[float, float, float]]) -> list[tuple[float, float]]:
    """(begin, end, value) of stretches of time as the points of a ``Line`` with steps."""
    return [point for begin, end, value in stretches for point in ((begin, value), (end, value))]


def _svg(title: str, about: str, height: int, parts: Sequence[str]) -> str:
    """A chart. ``aria-label`` has the description, because ids must be unique in a page."""
    label = safe(f"{title}. {about}")
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}" '
        f'xmlns="http://www.w3.org/2000/svg"><title>{safe(title)}</title>'
        f"<desc>{safe(about)}</desc>{''.join(parts)}</svg>"
    )


def _grid(highest: float, unit: str) -> Iterator[str]:
    """Horizontal lines at round values, with their labels, and the unit above them."""
    yield _text(0, 12, unit, "start")
    for value in _ticks(highest):
        y = _height(value, highest)
        yield f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>'
        yield _text(LEFT - 6, y + 4, short_number(value), "end")


def _ticks(highest: float) -> list[float]:
    """Zero and up to five round values, the last at or below the highest."""
    if not highest > 0:
        return [0.0]
    unit = 10.0 ** math.floor(math.log10(highest))
    step = next(unit * factor for factor in (0.2, 0.5, 1, 2) if highest / (unit * factor) <= 5.001)
    return [step * number for number in range(int(highest / step + 1e-9) + 1)]


def _height(value: float, highest: float) -> float:
    share = value / highest if highest > 0 else 0.0
    return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)


def _stretches(
    points: Sequence[tuple[float, float | None]],
) -> Iterator[list[tuple[float, float]]]:
    """The parts of a curve between its gaps."""
    stretch: list[tuple[float, float]] = []
    for at, value in points:
        if value is not None:
            stretch.append((at, value))
        elif stretch:
            yield stretch
            stretch = []
    if stretch:
        yield stretch


def _time_labels(first: float, last: float) -> Iterator[tuple[float, str]]:
    """Round times between two moments, and how they are written."""
    span = last - first
    days = [DAY_SECONDS * factor for factor in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)]
    steps = (*_TIME_STEPS, *days)
    step = next((step for step in steps if span / step <= MAX_LABELS - 1), steps[-1])
    pattern = "%H:%M:%S" if step < 60 else "%H:%M" if step < DAY_SECONDS else "%d %b"
    at = math.ceil(first / step) * step
    while at <= last:
        yield at, _moment(at).strftime(pattern)
        at += step


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(max(0.0, min(seconds, 2.0**37)), UTC)


def _text(x: float, y: float, text: str, anchor: str, kind: str = "label") -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{safe(text)}</text>'
    )


def _color(number: int) -> str:
    return f"s{number % NUM_COLORS + 1}"


def _cut(name: str) -> str:
    return name if len(name) <= MAX_NAME_CHARS else name[: MAX_NAME_CHARS - 3] + "..."
