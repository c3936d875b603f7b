"""Whether this worker can follow grammars: llguidance is native code, and may not load here."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

LIBRARY = "llguidance"


@cache
def why_not() -> str:
    """Why llguidance cannot be used, in a few words; "" if it can."""
    if find_spec("numpy") is None:
        return "numpy is not installed"
    try:
        import llguidance  # noqa: F401 - it may fail
    except (ImportError, OSError, AttributeError) as fault:
        return f"{LIBRARY} cannot be loaded: {fault}"[:200]
    return ""
