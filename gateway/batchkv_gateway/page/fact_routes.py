"""The facts of a batch's charts and its report, which are made of all of its results."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version

from redis import Redis
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from batchkv_gateway.http.answer import json_answer
from batchkv_gateway.native.visible import Visible
from batchkv_gateway.page.event_routes import check_signed_in
from batchkv_gateway.parts import Parts
from batchkv_producer.monitor.status import BatchStatus
from batchkv_producer.report.document import document
from batchkv_producer.report.facts import Facts
from batchkv_producer.report.reading import read_facts

MAX_KEPT = 32
Read = Callable[[Redis, str], Facts]


class FactRoutes:
    """The handlers. One batch is counted at a time, and the facts of 32 are kept."""

    def __init__(self, parts: Parts, read: Read = read_facts) -> None:
        self._connection, self._read = parts.connection, read
        self._visible = Visible(parts)
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[tuple[int, ...], Facts]] = OrderedDict()

    def routes(self) -> list[Route]:
        """The routes."""
        return [
            Route("/page/facts/{batch_id}", self.facts, methods=["GET"]),
            Route("/page/report/{batch_id}", self.report, methods=["GET"]),
        ]

    def facts(self, request: Request) -> Response:
        """The facts of one batch. It runs in a thread: 20,000 rows take about a second."""
        check_signed_in(request)
        batch = self._visible.batch(request)
        return json_answer(asdict(self._facts(batch)))

    def report(self, request: Request) -> Response:
        """The report of `batchkv report`, as a file to keep."""
        check_signed_in(request)
        batch = self._visible.batch(request)
        text = document(self._facts(batch), _own_version())
        name = f'attachment; filename="{batch.batch_id}.report.html"'
        return Response(text, media_type="text/html", headers={"content-disposition": name})

    def _facts(self, batch: BatchStatus) -> Facts:
        state = (batch.ok, batch.failed, batch.canceled, batch.created)
        with self._lock:
            known = self._kept.get(batch.batch_id)
            if known is None or known[0] != state:
                known = state, self._read(self._connection, batch.batch_id)
                self._kept[batch.batch_id] = known
            self._kept.move_to_end(batch.batch_id)
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
            return known[1]


def _own_version() -> str:
    """The version of this package; "" for a copy that is not installed."""
    try:
        return version("batchkv")
    except PackageNotFoundError:
        return ""
