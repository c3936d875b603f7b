"""The routes that read batches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from batchkv_gateway.http.answer import json_answer
from batchkv_gateway.native import PREFIX, file_jobs
from batchkv_gateway.native.listing import Listing, facts_of, more_fields
from batchkv_gateway.native.owners import Found
from batchkv_gateway.native.queries import checked_query, plain, switch, whole
from batchkv_gateway.native.visible import Visible, no_facts
from batchkv_gateway.parts import Parts
from batchkv_producer import batch_facts
from batchkv_producer.errors import NotFoundError
from batchkv_producer.manage.input_lines import MissingLines
from batchkv_producer.wire.redis_keys import job_id

DEFAULT_PAGE, MAX_PAGE = 50, 1000
PAGE_IDS = 500


class ReadRoutes:
    """The handlers. All of them run in threads."""

    def __init__(self, parts: Parts) -> None:
        self._visible, self._listing = Visible(parts), Listing(parts.connection)
        self._kept = parts.facts

    def routes(self) -> list[Route]:
        """The routes of this module."""
        one = f"{PREFIX}/batches/{{batch_id}}"
        return [
            Route(f"{PREFIX}/batches", self.list_batches, methods=["GET"]),
            Route(one, self.one, methods=["GET"]),
            Route(f"{one}/failures", self.failures, methods=["GET"]),
            Route(f"{one}/failed", self.failed, methods=["GET"]),
            Route(f"{one}/unanswered", self.unanswered, methods=["GET"]),
            Route(f"{one}/jobs", self.job_ids, methods=["GET"]),
            Route(f"{one}/jobs/{{line:int}}", self.job, methods=["GET"]),
        ]

    def list_batches(self, request: Request) -> Response:
        """A page of batches, the newest first. ``next`` is the ``after`` of the page after it."""
        query = checked_query(request, "limit", "after", "count")
        limit = whole(query, "limit", default=DEFAULT_PAGE, low=1, high=MAX_PAGE)
        left = batch_facts.all_times_left(self._visible.client, self._visible.client.workers())
        caller = request.state.caller
        page = self._listing.page(caller, query.get("after", ""), limit, left)
        answer: dict[str, Any] = {"object": "list", "data": page.items}
        answer |= {"has_more": bool(page.next_entry), "next": page.next_entry or None}
        if switch(query, "count"):
            answer["total"] = self._listing.count(caller)
        return json_answer(plain(answer))

    def one(self, request: Request) -> Response:
        """The facts of one batch; with ``facts=1`` also those of its report, in ``report``.

        A report reads all results. One is made at a time.
        """
        has_report = switch(checked_query(request, "facts"), "facts")
        found = self._visible.find(request)
        fields = self._fields(found, has_report=has_report)
        if fields is None:
            fields = facts_of(None, found.openai, found.owner, {})
            kept = self._visible.kept_facts(found) if has_report else None
            if has_report and kept is None:
                raise no_facts(found)
            fields |= {"report": asdict(kept)} if kept else {}
        if found.openai is not None:
            errors = found.openai.errors
            fields |= {"openai_errors": json.loads(errors) if errors else None}
        return json_answer(plain(fields))

    def _fields(self, found: Found, *, has_report: bool) -> dict[str, Any] | None:
        """The facts of a batch in the queue. None for one of OpenAI's API that is not there.

        The rows of such a batch may leave the queue while its facts are read.
        """
        try:
            batch = self._visible.client.status(found.batch_id)
            fields = batch_facts.facts_of(self._visible.client, batch).as_fields(batch)
            if has_report:
                fields["report"] = asdict(self._kept.of(batch))
        except NotFoundError:
            if found.openai is None:
                raise
            return None
        return {**fields, **more_fields(found.openai, found.owner, in_queue=True)}

    def failures(self, request: Request) -> Response:
        """The failed rows by code, the most frequent first."""
        checked_query(request)
        files = self._visible.in_files(self._visible.find(request))
        if files is not None:
            groups = files.failures()
        else:
            groups = self._visible.client.failures(self._visible.batch(request))
        return json_answer({"object": "list", "data": [asdict(each) for each in groups]})

    def failed(self, request: Request) -> Response:
        """The failed rows as lines of an input file, with ``canceled=1`` the canceled ones, too.

        The last line counts the rows that have no line.
        """
        canceled = switch(checked_query(request, "canceled"), "canceled")
        files, missing = self._visible.ended(request), MissingLines()
        if files is not None:
            lines = file_jobs.failed_lines(files, missing, canceled=canceled)
        else:
            batch = self._visible.batch(request)
            lines = self._visible.client.failed_lines(batch, missing, canceled=canceled)

        def pieces() -> Iterator[str]:
            yield from (f"{line}\n" for line in lines)
            yield json.dumps(asdict(missing)) + "\n"

        return StreamingResponse(pieces(), media_type="application/x-ndjson")

    def unanswered(self, request: Request) -> Response:
        """The numbers of rows without an answer, by the reason."""
        checked_query(request)
        files = self._visible.in_files(self._visible.find(request))
        if files is not None:
            return json_answer(asdict(files.unanswered()))
        batch_id = self._visible.queued(request).batch_id
        return json_answer(asdict(self._visible.client.unanswered(batch_id)))

    def job_ids(self, request: Request) -> Response:
        """The ids of a batch's jobs, in input order, one a line."""
        checked_query(request)
        if (files := self._visible.ended(request)) is not None:
            ids = file_jobs.job_ids(files)
        else:
            ids = iter(self._visible.client.job_ids(self._visible.queued(request).batch_id))
        pages = iter(lambda: "".join(f"{each}\n" for each in islice(ids, PAGE_IDS)), "")
        return StreamingResponse(pages, media_type="text/plain")

    def job(self, request: Request) -> Response:
        """One job."""
        checked_query(request)
        line = request.path_params["line"]
        if (files := self._visible.ended(request)) is not None:
            return json_answer(asdict(file_jobs.job(files, line)))
        name = job_id(self._visible.queued(request).batch_id, line)
        return json_answer(asdict(self._visible.client.job(name)))
