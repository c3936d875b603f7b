"""The facts of a batch's charts and its report, which are made of all of its results."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from batchkv_gateway.http.answer import json_answer
from batchkv_gateway.native.visible import Visible, no_facts
from batchkv_gateway.page.event_routes import check_signed_in
from batchkv_gateway.parts import Parts
from batchkv_producer.report.document import document
from batchkv_producer.report.facts import Facts


class FactRoutes:
    """The handlers."""

    def __init__(self, parts: Parts) -> None:
        self._visible, self._kept = Visible(parts), parts.facts

    def routes(self) -> list[Route]:
        """The routes."""
        return [
            Route("/page/facts/{batch_id}", self.facts, methods=["GET"]),
            Route("/page/report/{batch_id}", self.report, methods=["GET"]),
        ]

    def facts(self, request: Request) -> Response:
        """The facts of one batch. It runs in a thread: 20,000 rows take about a second."""
        check_signed_in(request)
        found = self._facts(request)
        return json_answer({**asdict(found), "tokens_per_second": found.tokens_per_second})

    def report(self, request: Request) -> Response:
        """The report of `batchkv report`, as a file to keep."""
        check_signed_in(request)
        found = self._facts(request)
        text = document(found, _own_version())
        name = f'attachment; filename="{found.status.batch_id}.report.html"'
        return Response(text, media_type="text/html", headers={"content-disposition": name})

    def _facts(self, request: Request) -> Facts:
        """The facts of a batch. Raises NotFoundError if neither rows nor facts are there."""
        found = self._visible.find(request)
        batch = self._visible.status(found)
        if batch is not None:
            return self._kept.of(batch)
        kept = self._visible.kept_facts(found)
        if kept is None:
            raise no_facts(found)
        return kept


def _own_version() -> str:
    """The version of this package; "" for a copy that is not installed."""
    try:
        return version("batchkv")
    except PackageNotFoundError:
        return ""
