"""``/page/events``: the stream of events of one viewer."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from batchkv_gateway.errors import UNAUTHORIZED, ApiError
from batchkv_gateway.http.auth import NOBODY
from batchkv_gateway.keys.store import LOCAL
from batchkv_gateway.native.owners import Sender
from batchkv_gateway.page.feed import Feed


class EventRoutes:
    """The handler."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def routes(self) -> list[Route]:
        """The route."""
        return [Route("/page/events", self.events, methods=["GET"])]

    async def events(self, request: Request) -> Response:
        """What changes, until the stream is a minute old or the viewer leaves."""
        check_signed_in(request)
        sender = Sender.of(request)
        # All who see everything share what is read.
        audience = Sender(LOCAL, sees_all=True) if sender.sees_all else sender
        return StreamingResponse(self._feed.stream(audience), media_type="text/event-stream")


def check_signed_in(request: Request) -> None:
    """Raise ApiError (401) for a caller without key and session."""
    if request.state.owner == NOBODY:
        raise ApiError(UNAUTHORIZED, "sign in on the page first", code="invalid_api_key")
