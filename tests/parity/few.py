"""Some cases of a long list: the suite runs these, and `make parity` all of them."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import TypeVar

Case = TypeVar("Case")
RUNS_ALL = os.environ.get("BATCHKV_PARITY", "") == "all"


def few(cases: Collection[Case], count: int) -> list[Case]:
    """So many cases, evenly spread: the first one is among them."""
    every = list(cases)
    if RUNS_ALL or count >= len(every):
        return every
    return [every[index * len(every) // count] for index in range(count)]
