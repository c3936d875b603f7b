"""Whether this machine runs on battery: from `pmset` on macOS, from /sys on Linux.

A machine whose power source is unknown raises OSError. One without a battery is never on battery.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ASK_SECONDS = 5.0
SUPPLIES = Path("/sys/class/power_supply")
_MAX_CHARS = 64  # of a file below SUPPLIES: one word
_SOURCE = re.compile(r"Now drawing from '([^']*)'")
_OTHERS = ("Battery", "UPS")  # types of supplies that run empty; any other comes from outside


def is_on_battery(platform: str = sys.platform, supplies: Path = SUPPLIES) -> bool:
    """Whether the machine runs on a battery or a UPS now. Raises OSError when that is unknown."""
    if platform == "darwin":
        return drains_mac(_pmset())
    return drains_linux(supplies)


def drains_mac(text: str) -> bool:
    """The answer in what `pmset -g batt` prints; OSError when its first line is not known.

    The source is 'AC Power', 'Battery Power' or 'UPS Power'.
    """
    found = _SOURCE.search(text)
    if found is None:
        raise OSError("pmset names no power source")
    return found[1] != "AC Power"


def drains_linux(supplies: Path) -> bool:
    """The answer in a folder like /sys/class/power_supply; no folder means no battery.

    A supply from outside that is online decides. The battery of a mouse (scope "Device") does not
    count.
    """
    is_draining = False
    for supply in _folders(supplies):
        if _word(supply / "scope") == "Device":
            continue
        if _word(supply / "type") in _OTHERS:
            is_draining |= _word(supply / "status") == "Discharging"
        elif _word(supply / "online") not in ("", "0"):
            return False
    return is_draining


def _pmset() -> str:
    try:
        asked = subprocess.run(
            ["pmset", "-g", "batt"],
            capture_output=True,
            timeout=ASK_SECONDS,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired as fault:
        raise OSError("pmset does not answer") from fault
    return asked.stdout.decode("utf-8", "replace")


def _folders(folder: Path) -> Iterator[Path]:
    try:
        yield from sorted(folder.iterdir())
    except FileNotFoundError:
        return


def _word(path: Path) -> str:
    """What a file holds, without blanks around; empty for one that cannot be read."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(_MAX_CHARS).strip()
    except OSError:
        return ""
