"""How much a bench measures."""

from __future__ import annotations

from dataclasses import dataclass

from batchkv_worker.errors import SettingsError

PARTS = ("passes", "prefill", "decode", "batches", "product")


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is measured.

    ``rows`` of batches, or fewer on a slow machine, but at least ``least_rows``. ``limit_seconds``
    for the repeats of one batch. ``row_seconds``: contexts are left out whose row would take longer
    to compute.
    """

    parts: tuple[str, ...] = PARTS
    pass_rows: tuple[int, ...] = (1, 8, 16, 32, 33, 64)
    prefill_tokens: tuple[int, ...] = (256, 512, 1024, 2048)
    contexts: tuple[int, ...] = (512, 2048, 8192)
    rows: int = 64
    least_rows: int = 8
    repeats: int = 3
    limit_seconds: float = 120.0
    row_seconds: float = 30.0
    sample_seconds: float = 2.0


QUICK = Extent(
    pass_rows=(1, 8),
    prefill_tokens=(256,),
    contexts=(64,),
    rows=8,
    repeats=1,
    limit_seconds=0.0,
    sample_seconds=0.0,
)


def parts_of(text: str) -> tuple[str, ...]:
    """Parts in a list by commas. Raises SettingsError for one that is not there."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in PARTS:
            raise SettingsError(f"--parts {text}: no part {name!r}; there are {', '.join(PARTS)}")
    if not names:
        raise SettingsError(f"--parts is empty; there are {', '.join(PARTS)}")
    return names
