"""How many rows of calls one key has open at once, at this gateway."""

from __future__ import annotations

from collections import Counter

from batchkv_gateway.errors import TOO_LARGE, TOO_MANY, ApiError
from batchkv_gateway.keys.caller import Caller


class RowLimits:
    """Counts the open rows of each owner. It is used in the event loop alone."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()

    def take(self, caller: Caller, num_rows: int) -> None:
        """Count rows as open. Raises ApiError if the caller would have too many of them."""
        most = caller.max_rows
        if most and num_rows > most:
            raise ApiError(
                TOO_LARGE,
                f"the request has {num_rows:,} rows, and this key may have {most:,} open at once: "
                "split it, or ask the operator for a key with a larger --max-rows",
                code="too_many_rows",
            )
        if most and self._open[caller.owner] + num_rows > most:
            raise ApiError(
                TOO_MANY,
                f"this key may have {most:,} rows open at once, and waits for "
                f"{self._open[caller.owner]:,}: try again when some have ended",
                code="too_many_open_rows",
            )
        self._open[caller.owner] += num_rows

    def release(self, caller: Caller, num_rows: int) -> None:
        """The rows have ended."""
        self._open[caller.owner] -= num_rows
        if self._open[caller.owner] <= 0:
            del self._open[caller.owner]
