"""``/page/facts/BATCH``: the facts of a batch's charts, which are made of all of its results."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from redis import Redis
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from batchkv_gateway.http.answer import json_answer
from batchkv_gateway.native.visible import Visible
from batchkv_gateway.page.event_routes import check_signed_in
from batchkv_gateway.parts import Parts
from batchkv_producer.monitor.status import BatchStatus
from batchkv_producer.report.facts import Facts
from batchkv_producer.report.reading import read_facts

MAX_KEPT = 32
Read = Callable[[Redis, str], Facts]


class FactRoutes:
    """The handler. One batch is counted at a time, and the facts of 32 are kept."""

    def __init__(self, parts: Parts, read: Read = read_facts) -> None:
        self._connection, self._read = parts.connection, read
        self._visible = Visible(parts)
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[tuple[int, ...], dict[str, Any]]] = OrderedDict()

    def routes(self) -> list[Route]:
        """The route."""
        return [Route("/page/facts/{batch_id}", self.facts, methods=["GET"])]

    def facts(self, request: Request) -> Response:
        """The facts of one batch. It runs in a thread: 20,000 rows take about a second."""
        check_signed_in(request)
        batch = self._visible.batch(request)
        with self._lock:
            return json_answer(self._facts(batch))

    def _facts(self, batch: BatchStatus) -> dict[str, Any]:
        state = (batch.ok, batch.failed, batch.canceled, batch.created)
        known = self._kept.get(batch.batch_id)
        if known is None or known[0] != state:
            known = state, asdict(self._read(self._connection, batch.batch_id))
            self._kept[batch.batch_id] = known
        self._kept.move_to_end(batch.batch_id)
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return known[1]
