"""Ids of files and batches: ``file-`` or ``batch_``, the time in microseconds, and 72 random bits.

Ids of one kind sort by time. So a page goes on after an id that was deleted meanwhile.
"""

from __future__ import annotations

import re
import secrets
import time

FILE, BATCH = "file-", "batch_"
_ID = re.compile(r"(?:file-|batch_)[0-9a-f]{32}")


def new_id(prefix: str) -> str:
    """A new id. Nobody can guess it."""
    return f"{prefix}{time.time_ns() // 1000:014x}{secrets.token_hex(9)}"


def is_id(text: str, prefix: str) -> bool:
    """Whether a text is an id of this kind."""
    return text.startswith(prefix) and _ID.fullmatch(text) is not None


def seconds_of(text: str) -> int:
    """The time of an id, in seconds since 1970."""
    return int(text[-32:-18], 16) // 10**6
