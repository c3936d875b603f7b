"""The abilities that this worker claims: rows that need another one wait for another worker."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from batchkv_producer.wire.maker import ABILITIES, GRAMMAR


@cache
def own_abilities() -> tuple[str, ...]:
    """All of this version, without grammars if their library is not installed."""
    has_library = all(find_spec(name) is not None for name in ("llguidance", "numpy"))
    return tuple(name for name in ABILITIES if has_library or name != GRAMMAR)
