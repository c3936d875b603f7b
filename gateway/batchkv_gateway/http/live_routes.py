"""``/v1/chat/completions`` and ``/v1/completions``: answers that the client waits for."""

from __future__ import annotations

from redis import Redis
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from batchkv_gateway.http.asked import json_bytes
from batchkv_gateway.http.client_left import ClientLeftError, while_client_stays
from batchkv_gateway.http.event_stream import EventStream
from batchkv_gateway.live.answering import begin
from batchkv_gateway.live.calls import Calls
from batchkv_gateway.live.row_limits import RowLimits
from batchkv_producer.wire.job import Endpoint


class LiveRoutes:
    """The handlers."""

    def __init__(self, connection: Redis, calls: Calls) -> None:
        self._connection, self._calls, self._limits = connection, calls, RowLimits()

    def routes(self) -> list[Route]:
        """The routes of this room."""
        return [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completion, methods=["POST"]),
        ]

    async def chat(self, request: Request) -> Response:
        """Answer a chat."""
        return await self._answer(request, "chat")

    async def completion(self, request: Request) -> Response:
        """Continue a prompt, or each of several."""
        return await self._answer(request, "completion")

    async def _answer(self, request: Request, endpoint: Endpoint) -> Response:
        raw = await json_bytes(request)
        caller = request.state.caller
        parts = (self._calls, self._connection, self._limits)
        answering = await begin(*parts, caller, raw, endpoint)
        named = {"x-request-id": answering.row_id}
        is_streaming = False
        try:
            async with while_client_stays(request.receive):
                if answering.asked.is_stream:
                    first = await answering.first_pieces()
                    is_streaming = True
                    return EventStream(answering.events(first), answering.leave, named)
                return Response(await answering.body(), 200, named, "application/json")
        except ClientLeftError:
            return Response()  # which nobody reads
        finally:
            if not is_streaming:
                answering.leave()
