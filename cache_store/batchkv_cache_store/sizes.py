"""Sizes in bytes, as people write and read them."""

from __future__ import annotations

import re

MIN_BYTES = 2**20
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SHOWN = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def parse_size(text: str) -> int:
    """Bytes of "4GB", "512 MiB", "1.5g" or a plain number; ValueError also below 1 MiB."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([kmgt]i?)?b?", text.strip().lower())
    if match is None:
        raise ValueError("it is not a size like 4GB or 512MiB")
    num_bytes = int(float(match[1]) * _UNITS[match[2] or ""])
    if num_bytes < MIN_BYTES:
        raise ValueError("it is less than 1MiB")
    return num_bytes


def shown_size(num_bytes: int) -> str:
    """The size for people, in a decimal unit: "512 B", "4.0 kB", "50.0 GB"."""
    for unit, name in _SHOWN:
        if num_bytes >= unit:
            return f"{num_bytes / unit:,.1f} {name}"
    return f"{num_bytes} B"
