"""The figures of a worker, as its record has them: JSON in ``bkv_figures``.

A count or level has a key like ``tokens.prompt``: what is counted, and which kind of it. Counts
only grow while the process lives. A reader ignores keys that it does not know.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

VERSION = 1
MAX_CHARS = 64 * 1024
MAX_ENTRIES = 256  # counts, levels or times
MAX_BOUNDS = 64
BUSY_SECONDS = "busy_seconds"  # level: of the last minute, how long the worker had rows
_KEY = re.compile(r"[a-z][a-z_]{0,40}(\.[A-Za-z0-9_-]{1,40}){0,2}")


@dataclass(frozen=True, slots=True)
class Times:
    """A histogram. ``counts`` has the events up to each bound (seconds), and those above all."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total_seconds: float


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """``since``: when its process began to count, in seconds since 1970."""

    since: float
    counts: Mapping[str, float] = field(default_factory=dict)
    levels: Mapping[str, float] = field(default_factory=dict)
    times: Mapping[str, Times] = field(default_factory=dict)


def encode_figures(figures: WorkerFigures) -> str:
    """The figures as text."""
    times = {
        key: {"le": one.bounds, "n": one.counts, "sum": round(one.total_seconds, 6)}
        for key, one in figures.times.items()
    }
    found = {"v": VERSION, "since": figures.since, "counts": dict(figures.counts)}
    return json.dumps(found | {"levels": dict(figures.levels), "times": times}, allow_nan=False)


def decode_figures(text: str) -> WorkerFigures | None:
    """The figures in a record. Wrong entries are left out, because anybody may have written them;
    None if nothing can be read."""
    if len(text) > MAX_CHARS:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if (
        not isinstance(found, dict)
        or found.get("v") != VERSION
        or not _is_number(found.get("since"))
    ):
        return None
    times = {key: _times(value) for key, value in _entries(found.get("times"))}
    return WorkerFigures(
        float(found["since"]),
        {key: value for key, value in _entries(found.get("counts")) if _is_number(value)},
        {key: value for key, value in _entries(found.get("levels")) if _is_number(value)},
        {key: one for key, one in times.items() if one is not None},
    )


def _entries(found: Any) -> list[tuple[str, Any]]:
    if not isinstance(found, dict):
        return []
    return [(key, value) for key, value in found.items() if _KEY.fullmatch(key)][:MAX_ENTRIES]


def _is_number(value: Any) -> bool:
    """Whether it is a finite number of 0 or more."""
    return type(value) in (int, float) and 0 <= value < 2**63  # neither infinity nor NaN is


def _times(value: Any) -> Times | None:
    if not isinstance(value, dict):
        return None
    bounds, counts, total = value.get("le"), value.get("n"), value.get("sum", -1)
    if not isinstance(bounds, list) or not isinstance(counts, list) or not _is_number(total):
        return None
    is_whole = len(bounds) <= MAX_BOUNDS and len(counts) == len(bounds) + 1
    if not is_whole or not all(map(_is_number, [*bounds, *counts])):
        return None
    if any(low >= high for low, high in pairwise(bounds)):
        return None
    return Times(tuple(map(float, bounds)), tuple(map(int, counts)), float(total))
