"""A line chart as SVG: enough for a benchmark's curves, without a package for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 640, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 50, 60
COLORS = ("#1f5fbf", "#c8501e", "#3a8f3a", "#7d3fb0", "#888888")


def write_chart(
    path: Path, title: str, x_name: str, y_name: str, lines: Mapping[str, Points], *, logs: bool
) -> None:
    """Curves by name over common axes; ``logs`` makes both logarithmic (all values above 0)."""
    points = [point for line in lines.values() for point in line]
    x_axis = _Axis([x for x, _ in points], LEFT, WIDTH - RIGHT, logs=logs)
    y_axis = _Axis([y for _, y in points], HEIGHT - BOTTOM, TOP, logs=logs)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(WIDTH / 2, 20, title, "middle", 'font-size="15"'),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 15, x_name, "middle"),
        _text(15, TOP - 12, y_name, "start"),
    ]
    for value in x_axis.ticks():
        at = x_axis.place(value)
        parts.append(_line(at, TOP, at, HEIGHT - BOTTOM))
        parts.append(_text(at, HEIGHT - BOTTOM + 16, f"{value:g}", "middle"))
    for value in y_axis.ticks():
        at = y_axis.place(value)
        parts.append(_line(LEFT, at, WIDTH - RIGHT, at))
        parts.append(_text(LEFT - 6, at + 4, f"{value:g}", "end"))
    for number, (name, line) in enumerate(lines.items()):
        color = COLORS[number % len(COLORS)]
        path_points = " ".join(f"{x_axis.place(x):.1f},{y_axis.place(y):.1f}" for x, y in line)
        parts.append(
            f'<polyline points="{path_points}" fill="none" stroke="{color}" stroke-width="2"/>'
        )
        parts.append(_text(LEFT + 10, TOP + 16 * (number + 1), name, "start", f'fill="{color}"'))
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", "utf-8")


class _Axis:
    """Values to places on the paper."""

    def __init__(self, values: Sequence[float], start: float, end: float, *, logs: bool) -> None:
        self._logs, self._start, self._end = logs, start, end
        low, high = (min(values), max(values)) if logs else (0.0, max(values))
        self._low, self._high = self._scale(low), self._scale(high)
        if self._low == self._high:
            self._high += 1

    def place(self, value: float) -> float:
        share = (self._scale(value) - self._low) / (self._high - self._low)
        return self._start + share * (self._end - self._start)

    def ticks(self) -> list[float]:
        """A handful of round values within the axis."""
        if self._logs:
            steps = range(math.ceil(self._low - 1e-9), math.floor(self._high + 1e-9) + 1)
            every = max(1, len(steps) // 8)
            return [2.0**step for step in steps][::every]
        unit = 10 ** math.floor(math.log10(self._high))
        step = unit if self._high / unit >= 4 else unit / 4
        return [step * number for number in range(int(self._high / step) + 1)]

    def _scale(self, value: float) -> float:
        return math.log2(value) if self._logs else value


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#dddddd"/>'
