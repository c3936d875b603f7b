"""The routes that make and change batches: submit, cancel, retry, delete."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from batchkv_gateway.http.answer import json_answer
from batchkv_gateway.native import PREFIX
from batchkv_gateway.native.again import retry_openai
from batchkv_gateway.native.queries import MAX_LINE, checked_query, plain, switch, whole
from batchkv_gateway.native.spool import Spool
from batchkv_gateway.native.submitting import Submitting
from batchkv_gateway.native.visible import Visible
from batchkv_gateway.parts import Parts
from batchkv_producer.intake.source import Inputs
from batchkv_producer.remote.terms import FilePart, Terms, read_terms, suffix_of
from batchkv_producer.wire.redis_keys import job_id

DEFAULT_NAME = "input"


class ChangeRoutes:
    """The handlers."""

    def __init__(self, parts: Parts) -> None:
        self._parts, self._visible = parts, Visible(parts)
        self._submitting = Submitting(parts)

    def routes(self) -> list[Route]:
        """The routes of this module."""
        one = f"{PREFIX}/batches/{{batch_id}}"
        return [
            Route(f"{PREFIX}/batches", self.submit, methods=["POST"]),
            Route(f"{one}/cancel", self.cancel, methods=["POST"]),
            Route(f"{one}/retry", self.retry, methods=["POST"]),
            Route(one, self.delete, methods=["DELETE"]),
        ]

    async def submit(self, request: Request) -> Response:
        """Queue the body as a batch, or with ``dry_run=1`` read and check it."""
        query = checked_query(request, "dry_run")
        terms, caller = read_terms(request.headers), request.state.caller
        work = self._submitting.plan if switch(query, "dry_run") else self._submitting.submit

        async def run(inputs: Inputs) -> dict[str, Any]:
            return await run_in_threadpool(work, caller, terms, inputs)

        return json_answer(plain(await self._spooled(request, terms, run)))

    async def _spooled(
        self,
        request: Request,
        terms: Terms,
        run: Callable[[Inputs], Awaitable[dict[str, Any]]],
    ) -> dict[str, Any]:
        """Store the body while ``run`` uses it."""
        folder, most = self._parts.files.folder, self._parts.settings.max_file_bytes
        name = terms.filename or DEFAULT_NAME
        spool = Spool(folder, terms.files, FilePart(name, most + 1, suffix_of(name)), most)
        try:
            await spool.read(request)
            return await run(await run_in_threadpool(spool.inputs, terms.read_as))
        finally:
            await run_in_threadpool(spool.close)

    def cancel(self, request: Request) -> Response:
        """Cancel a batch, or with ``line`` one row of it.

        ``canceled`` is the number of rows. A batch of OpenAI's API begins to be cancelled: it is
        the number of its rows that have not ended then.
        """
        query = checked_query(request, "line")
        found = self._visible.find(request)
        if "line" in query:
            line = whole(query, "line", default=0, low=1, high=MAX_LINE)
            num = self._visible.client.cancel(job_id(found.batch_id, line))
            return json_answer({"canceled": num})
        if found.openai is not None:
            status = self._visible.status(found)
            record = self._parts.batches.cancel(found.openai.owner, found.openai.batch_id)
            self._parts.driver.look_at(record.batch_id)
            num_open = status.total - status.num_ended if status else 0
            return json_answer({"canceled": num_open, "openai_status": record.status})
        return json_answer({"canceled": self._visible.client.cancel(found.batch_id)})

    async def retry(self, request: Request) -> Response:
        """Queue failed rows again, and from a body also those whose jobs are gone.

        Those of an ended batch of OpenAI's API become a new one: ``openai_id``.
        """
        checked_query(request)
        terms, caller = read_terms(request.headers), request.state.caller
        found = await run_in_threadpool(self._visible.find, request)
        if found.openai is not None:
            made = await run_in_threadpool(retry_openai, self._parts, caller, found.openai, terms)
            return json_answer(made)

        async def run(inputs: Inputs) -> dict[str, Any]:
            source = inputs if terms.files or terms.filename else None
            return await run_in_threadpool(
                self._submitting.retry, caller, found.batch_id, terms, source
            )

        return json_answer(await self._spooled(request, terms, run))

    def delete(self, request: Request) -> Response:
        """Delete a batch with its rows and results, in any state.

        One of OpenAI's API must be over. Its input stays, the files that it made do not.
        """
        checked_query(request)
        found = self._visible.find(request)
        if found.openai is not None:
            self._parts.batches.delete(found.openai)
            return json_answer({"batch_id": found.batch_id, "deleted": True})
        batch_id = self._visible.client.forget(found.batch_id)
        self._visible.owners.remove(batch_id)
        return json_answer({"batch_id": batch_id, "deleted": True})
