"""The routes of results and rows."""

from __future__ import annotations

from functools import partial
from typing import Literal, cast

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from batchkv_gateway.errors import invalid
from batchkv_gateway.http.answer import json_answer
from batchkv_gateway.native import PREFIX
from batchkv_gateway.native.file_jobs import stored_rows
from batchkv_gateway.native.queries import MAX_LINE, OUTCOMES, checked_query, one_of, switch, whole
from batchkv_gateway.native.rows import page_of_rows
from batchkv_gateway.native.stream import AskedRows, Form, RowStream, lines_of, pieces_of
from batchkv_gateway.native.visible import Visible
from batchkv_gateway.parts import Parts

DEFAULT_ROWS, MAX_ROWS = 100, 1000
MAX_LINES = 500  # that one request may name
LINES_TYPE = "application/x-ndjson"


class ResultRoutes:
    """The handlers."""

    def __init__(self, parts: Parts) -> None:
        self._connection, self._visible = parts.connection, Visible(parts)

    def routes(self) -> list[Route]:
        """The routes of this module."""
        one = f"{PREFIX}/batches/{{batch_id}}"
        return [
            Route(f"{one}/results", self.results, methods=["GET"]),
            Route(f"{one}/rows", self.rows, methods=["GET"]),
        ]

    async def results(self, request: Request) -> Response:
        """Results, one a line. A line that is blank shows that the gateway still follows."""
        names = ("after", "limit", "follow", "outcome", "order", "form", "lines")
        query = checked_query(request, *names)
        form = cast(Form, one_of(query, "form", ("out", "stored")))
        lines = _lines(query["lines"]) if "lines" in query else None
        order = cast(Literal["finish", "input"], one_of(query, "order", ("finish", "input")))
        is_followed = switch(query, "follow")
        if is_followed and order == "input":
            raise invalid("follow=1 is for order=finish: rows end in that order", "follow")
        after = whole(query, "after", default=0, high=MAX_LINE)
        limit = whole(query, "limit", default=0, high=MAX_LINE)
        outcome = one_of(query, "outcome", ("", *OUTCOMES))
        found = await run_in_threadpool(self._visible.find, request)
        files = await run_in_threadpool(self._visible.results_in_files, found)
        if files is not None:
            in_files = AskedRows(found.batch_id, order, after, limit, outcome, form)
            pieces = await run_in_threadpool(
                pieces_of, partial(stored_rows, files), in_files, lines
            )
            return StreamingResponse(pieces, media_type=LINES_TYPE)
        found = await run_in_threadpool(self._visible.queued, request)
        if lines is not None:
            body = await run_in_threadpool(lines_of, self._connection, found.batch_id, lines, form)
            return Response(body, media_type=LINES_TYPE)
        asked = AskedRows(found.batch_id, order, after, limit, outcome, form, is_followed)
        stream = RowStream(self._connection, asked)
        return StreamingResponse(stream.pieces(), media_type=LINES_TYPE)

    def rows(self, request: Request) -> Response:
        """Rows by line, also those that have not ended. ``next``: as ``after`` of the next page.

        Those of an ended batch of OpenAI's API are read from its files.
        """
        query = checked_query(request, "after", "limit", "outcome", "full")
        after = whole(query, "after", default=0, high=MAX_LINE)
        limit = whole(query, "limit", default=DEFAULT_ROWS, low=1, high=MAX_ROWS)
        outcome, full = one_of(query, "outcome", ("", *OUTCOMES)), switch(query, "full")
        if (files := self._visible.in_files(self._visible.find(request))) is not None:
            page = files.page(after, limit, outcome, full=full)
        else:
            batch = self._visible.batch(request)
            page = page_of_rows(self._connection, batch, after, limit, outcome, full=full)
        has_more = bool(page.next_line)
        answer = {"data": page.rows, "has_more": has_more, "next": page.next_line or None}
        return json_answer({"object": "list", **answer})


def _lines(text: str) -> list[int]:
    """The lines that a query names. Raises ApiError."""
    words = text.split(",")
    is_right = all(each.isascii() and each.isdecimal() and len(each) <= 12 for each in words)
    if not is_right or len(words) > MAX_LINES:
        raise invalid(f"lines must be at most {MAX_LINES} numbers, like 1,5,9", "lines")
    return [int(each) for each in words]
