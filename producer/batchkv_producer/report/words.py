"""Numbers and times as a report writes them. All times are in UTC."""

from __future__ import annotations

from datetime import UTC, datetime
from html import escape

from batchkv_producer.progress import duration, printable

_STEPS = ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))


def safe(text: str) -> str:
    """Any text as text of HTML: markup is escaped, and control characters are written out."""
    return escape(printable(text))


def utc(seconds: float) -> str:
    """Seconds since 1970 as ISO 8601; ``unknown`` if there is no such time."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (OverflowError, ValueError, OSError):
        return "unknown"


def short_number(value: float) -> str:
    """A number in at most five characters: ``950``, ``1.2k``, ``34M``, ``0.25``."""
    for unit, letter in _STEPS:
        if value >= 0.9995 * unit:
            return f"{value / unit:.3g}{letter}"
    return f"{value:.3g}"


def seconds_text(milliseconds: float) -> str:
    """Milliseconds as a time: ``0.25 s``, ``12 s``, ``3m20s``."""
    seconds = milliseconds / 1000
    return f"{seconds:.3g} s" if seconds < 60 else duration(seconds)


def span_text(seconds: int) -> str:
    """A width of bins in words: ``1 second``, ``15 minutes``, ``3 hours``."""
    sizes = ((86_400, "day"), (3600, "hour"), (60, "minute"), (1, "second"))
    size, name = next(each for each in sizes if seconds >= each[0])
    count = seconds // size
    return f"{count} {name}" + ("" if count == 1 else "s")


def per_cent(part: float, whole: float) -> str:
    """A share as per cent: ``12.5 %``. A dash if there is no whole."""
    return f"{100 * part / whole:.1f} %" if whole else "-"
