"""Errors as OpenAI writes them: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import json
import logging
import secrets

from redis.exceptions import ConnectionError, RedisError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from batchkv_gateway.errors import (
    FORBIDDEN,
    FULL,
    INTERNAL,
    LONG_HEADERS,
    NO_METHOD,
    NOT_FOUND,
    TIMED_OUT,
    TOO_LARGE,
    TOO_MANY,
    UNAUTHORIZED,
    UNAVAILABLE,
    ApiError,
)
from batchkv_producer.disk import takes_no_writes
from batchkv_producer.errors import ExpiredError, NotFoundError, RefusedError, UsageError
from batchkv_producer.server.memory_use import FULL as FULL_SERVER
from batchkv_producer.server.memory_use import is_full

log = logging.getLogger(__name__)

RETRY_SECONDS = 5
NO_PATH = (
    "there is no such path. There are /v1/files, /v1/batches, /v1/chat/completions, "
    "/v1/completions and /v1/models"
)

# The first part of a path that OpenAI has, and the sentence for it.
OTHER_TASKS = {
    "responses": "use /v1/chat/completions: tools that prefer /v1/responses have a setting for it",
    **dict.fromkeys(
        ("audio", "embeddings", "images", "moderations", "videos"), "models answer with text only"
    ),
}


def new_request_id() -> str:
    """An id for a request, which its answer names."""
    return f"req_{secrets.token_hex(16)}"


def error_body(status: int, message: str, code: str | None, param: str | None = None) -> bytes:
    """The body of an error."""
    kind = "server_error" if status >= INTERNAL else "invalid_request_error"
    kind = "rate_limit_error" if status == TOO_MANY else kind
    fault = {"message": message, "type": kind, "param": param, "code": code}
    return json.dumps({"error": fault}).encode("ascii")


def error_response(fault: ApiError) -> Response:
    """The response to a refused request. It tells OpenAI's client whether to try again."""
    may_retry = fault.status >= INTERNAL or fault.status in (TIMED_OUT, TOO_MANY)
    may_retry &= fault.status != FULL  # somebody has to make room first
    headers = {"x-should-retry": "true" if may_retry else "false"}
    if fault.status == UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    if fault.status in (UNAVAILABLE, TOO_MANY):
        headers["retry-after"] = str(RETRY_SECONDS)
    if fault.status in (FORBIDDEN, TIMED_OUT, TOO_LARGE, LONG_HEADERS):  # nothing more is read
        headers["connection"] = "close"
    return Response(
        error_body(fault.status, str(fault), fault.code, fault.param),
        fault.status,
        headers,
        media_type="application/json",
    )


async def on_api_error(_: Request, fault: Exception) -> Response:
    """Handler of ApiError."""
    assert isinstance(fault, ApiError)
    return error_response(fault)


async def on_usage_error(_: Request, fault: Exception) -> Response:
    """Handler of UsageError: the producer refuses an argument."""
    return error_response(ApiError(400, str(fault), code="invalid_value"))


async def on_not_found(_: Request, fault: Exception) -> Response:
    """Handler of NotFoundError: there is no such batch or job for this sender."""
    code = "expired" if isinstance(fault, ExpiredError) else "not_found"
    return error_response(ApiError(NOT_FOUND, str(fault), code=code, param="id"))


async def on_refused(_: Request, fault: Exception) -> Response:
    """Handler of RefusedError: the gateway's own user of the server has no right to it."""
    return error_response(ApiError(FORBIDDEN, str(fault), code="forbidden"))


async def on_http_error(request: Request, fault: Exception) -> Response:
    """Handler of Starlette's own errors: no such path, or not this method."""
    assert isinstance(fault, HTTPException)
    task = request.url.path.removeprefix("/v1/").partition("/")[0]
    if fault.status_code == NOT_FOUND and task in OTHER_TASKS:
        words = f"there is no /v1/{task} here: {OTHER_TASKS[task]}"
        return error_response(ApiError(NOT_FOUND, words, code="unknown_url"))
    sentences = {NOT_FOUND: NO_PATH, NO_METHOD: "this path does not have this method"}
    message = sentences.get(fault.status_code, fault.detail)
    response = error_response(ApiError(fault.status_code, message, code="unknown_url"))
    response.headers.update(fault.headers or {})
    if fault.status_code == NO_METHOD:
        response.headers["allow"] = ", ".join(_methods_of(request))
    return response


def _methods_of(request: Request) -> list[str]:
    """The methods of a path. Each has a route of its own, and a route knows its own alone."""
    routes = (route for route in request.app.routes if isinstance(route, Route))
    matching = (one for one in routes if one.matches(request.scope)[0] is not Match.NONE)
    return sorted({method for route in matching for method in route.methods or ()})


def queue_unavailable(fault: RedisError) -> Response:
    """The response while Redis fails. The client gets no details of the server."""
    if is_full(fault) or takes_no_writes(fault):
        why = FULL_SERVER if is_full(fault) else "cannot write to its disk: free space there"
        log.warning("Redis %s", why)
        return error_response(ApiError(FULL, f"the queue's server {why}", code="queue_full"))
    hint = ""
    if isinstance(fault, ConnectionError):
        hint = ". If it is the embedded server of this machine and was stopped, `batchkv server "
        hint += "start` starts it"
    log.warning("Redis: %s%s", str(fault).rstrip("."), hint)
    message = "the queue's server does not answer or refuses it: try again"
    return error_response(ApiError(UNAVAILABLE, message, code="queue_unavailable"))


async def on_redis_error(_: Request, fault: Exception) -> Response:
    """Handler of Redis's errors."""
    assert isinstance(fault, RedisError)
    return queue_unavailable(fault)


async def on_bug(request: Request, _: Exception) -> Response:
    """Handler of everything else. The log has the trace, and before it the request's id."""
    log.error("request %s failed", request.state.request_id)
    return error_response(ApiError(INTERNAL, "the gateway failed; its log says why"))


HANDLERS = {
    ApiError: on_api_error,
    NotFoundError: on_not_found,
    RefusedError: on_refused,
    UsageError: on_usage_error,
    HTTPException: on_http_error,
    RedisError: on_redis_error,
    Exception: on_bug,
}
