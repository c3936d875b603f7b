"""Server-sent events: a response that goes on while there is something to send."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import suppress

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from batchkv_gateway.errors import ApiError
from batchkv_gateway.http.client_left import ClientLeftError, while_client_stays
from batchkv_gateway.http.errors import error_body


class EventStream(Response):
    """Sends what a generator yields, piece by piece, until its end or until the client leaves.

    If the generator raises ApiError, that is the last event. ``on_end`` is called in the end,
    however it came.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        on_end: Callable[[], object],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(None, headers=headers)
        del self.headers["content-length"]
        self.headers["x-accel-buffering"] = "no"  # nginx would keep events until it has many
        self._events, self._on_end = events, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events."""
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            with suppress(ClientLeftError):
                async with while_client_stays(receive):
                    await send(head)
                    async for event in self._all():
                        await send({"type": "http.response.body", "body": event, "more_body": True})
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._on_end()
            await self._events.aclose()

    async def _all(self) -> AsyncIterator[bytes]:
        try:
            async for event in self._events:
                yield event
        except ApiError as fault:
            body = error_body(fault.status, str(fault), fault.code, fault.param)
            yield b"data: " + body + b"\n\n"
