"""What traces of workers say of some time: shares by phase, memory, and what came before."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchkv_worker.trace import END, ENGINE, LOAD, MEASURE, REDIS, START

BEFORE = (START, LOAD, MEASURE)
Event = dict[str, Any]


def events_of(file: Path) -> list[Event]:
    """The events of a trace, of one whose writer was killed, too."""
    text = file.read_text("utf-8")
    found: list[Event] = json.loads(text if text.endswith("]\n") else text + "]")
    return found


def told(files: Sequence[Path], first: float, last: float) -> dict[str, Any]:
    """Of the time from ``first`` to ``last`` (seconds since 1970), on average of the workers.

    ``shares`` are of the engine's thread, and of the main one what it waited for Redis: that goes
    on beside the engine. ``before`` has the seconds of starting, loading and measuring.
    """
    seconds: dict[str, float] = defaultdict(float)
    before: dict[str, float] = defaultdict(float)
    peak = 0.0
    for file in files:
        for event in events_of(file):
            if event["ph"] == "C":
                peak = max(peak, event["args"].get("peak_mb", 0.0))
            if event["ph"] != "X":
                continue
            begin, name = event["ts"] / 1e6, event["name"]
            inside = min(begin + event["dur"] / 1e6, last) - max(begin, first)
            is_engines = event["tid"] == ENGINE.number
            if is_engines and name in BEFORE:
                before[name] += event["dur"] / 1e6 / len(files)
            elif (is_engines and name != END) or name == REDIS:
                seconds[name] += max(0.0, inside)
    whole = (last - first) * len(files)
    return {
        "shares": {name: round(spent / whole, 4) for name, spent in seconds.items()},
        "before": {name: round(spent, 2) for name, spent in before.items()},
        **({"peak_mb": peak} if peak else {}),
    }
