"""Reads the limit of memory in a server's configuration."""

from __future__ import annotations

import re

_LIMIT = re.compile(
    r"""^[ \t]*maxmemory[ \t]+(?P<quote>["']?)([0-9]{1,18})([a-z]*)(?P=quote)[ \t\r]*$""",
    re.IGNORECASE | re.MULTILINE,
)
_UNITS = {"": 1, "b": 1}
_UNITS |= {unit: 1000**power for power, unit in enumerate(("k", "m", "g", "t"), start=1)}
_UNITS |= {unit: 1024**power for power, unit in enumerate(("kb", "mb", "gb", "tb"), start=1)}


def limit_in(configuration: str) -> int:
    """``maxmemory`` of a server's configuration in bytes, the last one; 0 if there is none.

    A server reads ``4gb``, and the same in quotes.
    """
    found = list(_LIMIT.finditer(configuration))
    if not found:
        return 0
    return int(found[-1][2]) * _UNITS.get(found[-1][3].lower(), 0)
