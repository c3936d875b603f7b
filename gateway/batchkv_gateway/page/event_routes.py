"""``/page/events``: the stream of events of one viewer."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from batchkv_gateway.errors import UNAUTHORIZED, ApiError
from batchkv_gateway.http.auth import NOBODY
from batchkv_gateway.keys.caller import Caller
from batchkv_gateway.page.feed import Feed

EVERYBODY = Caller(sees_all=True)


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
        caller: Caller = request.state.caller
        # All who see everything share what is read.
        audience = EVERYBODY if caller.sees_all else Caller(caller.owner)
        return StreamingResponse(self._feed.stream(audience), media_type="text/event-stream")


def check_signed_in(request: Request) -> None:
    """Raise ApiError (401) for a caller without key and session."""
    if request.state.owner == NOBODY:
        raise ApiError(UNAUTHORIZED, "sign in on the page first", code="invalid_api_key")
