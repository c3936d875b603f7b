"""``/v1/models``: what workers serve now."""

from __future__ import annotations

import time
from typing import Any

from redis import Redis
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from batchkv_gateway.errors import NOT_FOUND, ApiError
from batchkv_gateway.http.answer import json_answer
from batchkv_producer.monitor.workers import served_models


class ModelRoutes:
    """The handlers."""

    def __init__(self, connection: Redis) -> None:
        self._connection = connection
        self._began = int(time.time())

    def routes(self) -> list[Route]:
        """The routes of this room."""
        return [
            Route("/v1/models", self.list_models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.one, methods=["GET"]),
        ]

    def list_models(self, _: Request) -> Response:
        """The models of the live workers, those with an adapter as MODEL@NAME."""
        return json_answer({"object": "list", "data": [self._model(n) for n in self._names()]})

    def one(self, request: Request) -> Response:
        """One model, if some worker serves it."""
        name = request.path_params["name"]
        if name not in self._names():
            served = ", ".join(self._names())[:400] or "nothing"
            message = f"there is no model {name[:80]!r}. Served now: {served}"
            raise ApiError(NOT_FOUND, message, code="model_not_found", param="model")
        return json_answer(self._model(name))

    def _names(self) -> list[str]:
        return served_models(self._connection)

    def _model(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._began, "owned_by": "batchkv"}
