"""The routes of workers, of their queues, and of the server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from redis import Redis
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from batchkv_gateway.errors import FORBIDDEN, ApiError, invalid
from batchkv_gateway.http.answer import json_answer
from batchkv_gateway.native import PREFIX
from batchkv_gateway.native.listing import Listing
from batchkv_gateway.native.queries import checked_query, plain
from batchkv_gateway.parts import Parts
from batchkv_producer import batch_facts
from batchkv_producer.client import Client
from batchkv_producer.errors import RefusedError
from batchkv_producer.manage import drain
from batchkv_producer.monitor.samples import read_samples
from batchkv_producer.server.memory_use import read_memory_use


class WorkerRoutes:
    """The handlers. All of them run in threads."""

    def __init__(self, parts: Parts) -> None:
        self._connection, self._client = parts.connection, Client(parts.connection)
        self._listing = Listing(parts.connection)

    def routes(self) -> list[Route]:
        """The routes of this module."""
        return [
            Route(f"{PREFIX}/workers", self.workers, methods=["GET"]),
            Route(f"{PREFIX}/workers/{{name}}/drain", self.drain, methods=["POST"]),
            Route(f"{PREFIX}/workers/{{name}}/resume", self.resume, methods=["POST"]),
            Route(f"{PREFIX}/left", self.left, methods=["GET"]),
            Route(f"{PREFIX}/samples", self.samples, methods=["GET"]),
            Route(f"{PREFIX}/server", self.server, methods=["GET"]),
        ]

    def workers(self, request: Request) -> Response:
        """The live workers: all, or those of a queue, as this queue sees them.

        ``apart``: the rows of the queue that wait to run apart, because a worker died with them.
        """
        queue = checked_query(request, "queue").get("queue", "")
        found = self._client.serving(queue) if queue else self._client.workers()
        answer: dict[str, Any] = {"data": batch_facts.worker_dicts(found)}
        answer["apart"] = self._client.count_apart(queue) if queue else None
        return json_answer(plain({"object": "list", **answer}))

    def drain(self, request: Request) -> Response:
        """Let a worker end its rows and take no more, for those who see all."""
        return self._order(request, drain.drain, is_drained=True)

    def resume(self, request: Request) -> Response:
        """Let a drained worker take rows again, for those who see all."""
        return self._order(request, drain.resume, is_drained=False)

    def _order(
        self, request: Request, give: Callable[[Redis, str], None], *, is_drained: bool
    ) -> Response:
        _check_sees_all(request)
        name = request.path_params["name"]
        try:
            give(self._connection, name)
        except RefusedError as fault:
            raise ApiError(FORBIDDEN, str(fault), code="forbidden") from fault
        return json_answer({"name": name, "is_drained": is_drained})

    def left(self, request: Request) -> Response:
        """The seconds until the batches of the caller are done, where they are known."""
        checked_query(request)
        caller, found = request.state.caller, self._client.workers()
        left = batch_facts.all_times_left(self._client, found)
        return json_answer({"data": self._listing.visible(caller, left)})

    def samples(self, request: Request) -> Response:
        """The samples of a queue in the last day, one for each minute, the oldest first."""
        queue = checked_query(request, "queue").get("queue", "")
        if not queue:
            raise invalid("name the queue: samples?queue=NAME", "queue")
        found = read_samples(self._connection, queue)
        return json_answer({"object": "list", "data": [asdict(each) for each in found]})

    def server(self, request: Request) -> Response:
        """The memory of the queue's server, for those who see all batches."""
        checked_query(request)
        use = read_memory_use(self._connection) if request.state.caller.sees_all else None
        return json_answer({"memory": asdict(use) if use else None})


def _check_sees_all(request: Request) -> None:
    """Raise ApiError for a key that is no admin's."""
    checked_query(request)
    if not request.state.caller.sees_all:
        raise ApiError(
            FORBIDDEN,
            "only an admin's key manages workers: `batchkv keys add NAME --admin` makes one",
            code="forbidden",
        )
