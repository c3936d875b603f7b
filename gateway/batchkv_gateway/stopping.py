"""Says once that the gateway stops, so that open streams can end."""

from __future__ import annotations

import asyncio


class Stopping:
    """One gateway's. All of it belongs to the event loop's thread."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    @property
    def has_begun(self) -> bool:
        """Whether the gateway stops. It accepts no more connections then."""
        return self._event.is_set()

    def begin(self) -> None:
        """The gateway stops: requests that run have a few seconds left."""
        self._event.set()

    async def wait(self) -> None:
        """Wait until it stops."""
        await self._event.wait()
