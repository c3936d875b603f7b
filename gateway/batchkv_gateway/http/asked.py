"""Reads queries and JSON bodies, and refuses what they should not have."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from batchkv_gateway.errors import invalid
from batchkv_gateway.http.limits import read_body
from batchkv_gateway.ids import is_id
from batchkv_gateway.pages import Asked

PIECE_BYTES = 2**20  # read from the network before a thread gets them


def page_of(
    query: Mapping[str, str], prefix: str, *, default: int, most: int, has_order: bool
) -> Asked:
    """The page that a query asks for."""
    text = query.get("limit", str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 8 and 1 <= int(text) <= most):
        raise invalid(f"limit must be 1 to {most}", "limit")
    after = query.get("after", "")
    if after and not is_id(after, prefix):
        raise invalid("after must be the id of the last item of a page", "after")
    order = query.get("order", "desc") if has_order else "desc"
    if order not in ("asc", "desc"):
        raise invalid("order must be asc or desc", "order")
    return Asked(after, int(text), "asc" if order == "asc" else "desc")


async def json_bytes(request: Request) -> bytes:
    """The body of a request whose header says that it is JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise invalid("the body must be JSON: send Content-Type: application/json")
    return await read_body(request.receive)


async def json_object(request: Request, fields: Collection[str]) -> dict[str, Any]:
    """The object in a request's body. Raises ApiError for anything else, or an unknown field."""
    raw = await json_bytes(request)
    try:
        found = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError):
        raise invalid("the body is not JSON in UTF-8", code="invalid_json") from None
    if not isinstance(found, dict):
        raise invalid("the body must be a JSON object")
    for name in found.keys() - set(fields):
        raise invalid(f"unknown field {name[:80]!r}", name[:80], "unknown_parameter")
    return {name: value for name, value in found.items() if value is not None}


async def feed(request: Request, write: Callable[[bytes], None]) -> None:
    """Give a large body to ``write`` in a thread, a piece at a time. One piece is in memory."""
    piece, is_over = bytearray(), False
    while not is_over:
        message = await request.receive()
        if message["type"] != "http.request":
            raise invalid("the client left before its body was complete")
        piece += message.get("body", b"")
        is_over = not message.get("more_body", False)
        if piece and (is_over or len(piece) >= PIECE_BYTES):
            await run_in_threadpool(write, bytes(piece))
            piece.clear()
