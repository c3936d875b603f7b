"""Suspects: rows that a worker had begun when it died. ``lua/suspects.lua`` says what they are."""

from __future__ import annotations

import re

from batchkv_producer.transitions import MAX_DEATHS

_GROUP = re.compile(rb"[0-9A-Za-z-]+\.?1?")
_COUNT = re.compile(rb"0*[1-9][0-9]{0,3}")
_MAX_GROUP_CHARS = 50


def is_suspect(group: bytes | None, deaths: bytes | None) -> bool:
    """By the fields ``bkv_suspect`` and ``bkv_deaths`` of its job, which anybody may have written.

    Versions that knew no groups wrote the second alone.
    """
    if group and len(group) <= _MAX_GROUP_CHARS and _GROUP.fullmatch(group):
        return True
    return bool(deaths and len(deaths) <= 4 and _COUNT.fullmatch(deaths))


def deaths_until_failed(num_rows: int) -> int:
    """How many holders a row costs at most that kills each of them, begun beside others.

    The first death makes the group, each other one halves it, until the row has died alone often
    enough.
    """
    return 1 + max(0, num_rows - 1).bit_length() + MAX_DEATHS
