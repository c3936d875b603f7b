"""``/v1/files``: upload, list, facts, content, delete."""

from __future__ import annotations

from contextlib import suppress

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from batchkv_gateway.errors import NOT_FOUND, ApiError, invalid
from batchkv_gateway.files.form import UploadForm
from batchkv_gateway.files.records import PURPOSES, FileRecord, Files
from batchkv_gateway.http.answer import json_answer
from batchkv_gateway.http.asked import feed, page_of
from batchkv_gateway.http.limits import DRAIN_BYTES, FORM_BYTES
from batchkv_gateway.http.ranges import refused_range
from batchkv_gateway.ids import FILE
from batchkv_gateway.keys.caller import Caller
from batchkv_gateway.pages import as_list
from batchkv_gateway.settings import GatewaySettings

DEFAULT_PAGE = MAX_PAGE = 10_000


class FileRoutes:
    """The handlers. All but the reading of bodies runs in threads."""

    def __init__(self, files: Files, settings: GatewaySettings) -> None:
        self._files, self._settings = files, settings

    def routes(self) -> list[Route]:
        """The routes of this room."""
        return [
            Route("/v1/files", self.upload, methods=["POST"]),
            Route("/v1/files", self.list_files, methods=["GET"]),
            Route("/v1/files/{file_id}", self.facts, methods=["GET"]),
            Route("/v1/files/{file_id}", self.delete, methods=["DELETE"]),
            Route("/v1/files/{file_id}/content", self.content, methods=["GET"]),
        ]

    async def upload(self, request: Request) -> Response:
        """Store a file. Its content is synced before the answer."""
        most = self._settings.max_file_bytes
        caller: Caller = request.state.caller
        await self._check_room(request, caller)
        kind = request.headers.get("content-type", "")
        form = UploadForm(kind, lambda: self._files.folder.begin(most))
        try:
            await feed(request, form.write)
            record = await run_in_threadpool(self._finish, form, caller)
        finally:
            await run_in_threadpool(form.close)
        return json_answer(record.as_object())

    async def _check_room(self, request: Request, caller: Caller) -> None:
        """Raise ApiError for an upload that is too large for its key, before it is written."""
        length = request.headers.get("content-length", "")
        if not caller.max_bytes or not length.isdecimal():
            return
        num_bytes = max(0, int(length) - FORM_BYTES)
        try:
            await run_in_threadpool(self._files.check_room, caller, num_bytes)
        except ApiError:
            await _drop(request)
            raise

    def list_files(self, request: Request) -> Response:
        """A page of files."""
        query = request.query_params
        purpose = query.get("purpose", "")
        if purpose not in ("", *PURPOSES):
            raise invalid(f"purpose must be one of {', '.join(PURPOSES)}", "purpose")
        asked = page_of(query, FILE, default=DEFAULT_PAGE, most=MAX_PAGE, has_order=True)
        found, has_more = self._files.page(request.state.owner, purpose, asked)
        return json_answer(as_list([record.as_object() for record in found], has_more))

    def facts(self, request: Request) -> Response:
        """One file's facts."""
        return json_answer(self._find(request).as_object())

    def content(self, request: Request) -> Response:
        """One file's bytes. They are never shown as a page."""
        record = self._find(request)
        path = self._files.folder.content(record.content_name)
        if not path.is_file():
            raise ApiError(
                NOT_FOUND,
                f"the content of file {record.file_id} is not in this gateway's folder: it was "
                "deleted, or another gateway with a folder of its own has it",
                code="content_lost",
                param="id",
            )
        refused = refused_range(request, path.stat().st_size)
        return refused or FileResponse(path, media_type="application/octet-stream")

    def delete(self, request: Request) -> Response:
        """Delete a file that no open batch reads."""
        file_id = request.path_params["file_id"]
        self._files.delete(request.state.owner, file_id)
        return json_answer({"id": file_id, "object": "file", "deleted": True})

    def _find(self, request: Request) -> FileRecord:
        return self._files.find(request.state.owner, request.path_params["file_id"])

    def _finish(self, form: UploadForm, caller: Caller) -> FileRecord:
        incoming, upload = form.finish()
        seconds = upload.expires_after_seconds or self._settings.keep_files_seconds
        return self._files.store(incoming, caller, upload.filename, seconds)


async def _drop(request: Request) -> None:
    """Read what a client sends, so that it reads the answer. Not all, if it is too much."""
    num_bytes = 0
    with suppress(ClientDisconnect):
        async for piece in request.stream():
            num_bytes += len(piece)
            if num_bytes > DRAIN_BYTES:
                return
