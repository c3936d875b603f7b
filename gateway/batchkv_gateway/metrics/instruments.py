"""What this gateway counts of its own requests."""

from __future__ import annotations

import time
from collections.abc import Iterable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
)
from prometheus_client.core import Metric as Family
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from batchkv_gateway.metrics import table

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
STREAMS = (b"text/event-stream", b"application/x-ndjson")


class Instruments:
    """The gateway's own metrics. Threads may share them."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        registry = self._registry = CollectorRegistry(auto_describe=False)

        def gauge(metric: table.Metric) -> Gauge:
            return Gauge(metric.name, metric.about, metric.labels, registry=registry)

        def counter(metric: table.Metric) -> Counter:
            return Counter(metric.name, metric.about, metric.labels, registry=registry)

        gauge(table.OWN_START).set(time.time())
        self.requests = counter(table.OWN_REQUESTS)
        self.received, self.sent = counter(table.OWN_RECEIVED), counter(table.OWN_SENT)
        self.open, self.streams = gauge(table.OWN_OPEN), gauge(table.OWN_STREAMS)
        seconds = table.OWN_SECONDS
        self.seconds = Histogram(
            *(seconds.name, seconds.about, seconds.labels), registry=registry, buckets=BUCKETS
        )

    def collect(self) -> Iterable[Family]:
        """All of them, with their values."""
        return self._registry.collect()


class Measured:
    """Counts each request around the whole application, also those that it refuses."""

    def __init__(self, app: ASGIApp, instruments: Instruments) -> None:
        self._app, self._instruments = app, instruments

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        one = _Measured(self._instruments, receive, send)
        self._instruments.open.inc()
        try:
            await self._app(scope, one.receive, one.send)
        finally:
            self._instruments.open.dec()
            one.end(scope)


class _Measured:
    """One request."""

    def __init__(self, instruments: Instruments, receive: Receive, send: Send) -> None:
        self._instruments, self._receive, self._send = instruments, receive, send
        self._began = time.perf_counter()
        self._status = "none"  # no answer has begun
        self._num_received = self._num_sent = 0
        self._is_stream = False

    async def receive(self) -> Message:
        """Count the bytes that the client sent."""
        message = await self._receive()
        self._num_received += len(message.get("body", b""))
        return message

    async def send(self, message: Message) -> None:
        """Count the bytes of the answer."""
        if message["type"] == "http.response.start":
            self._status = str(message["status"])
            kinds = [v for name, v in message.get("headers", ()) if name.lower() == b"content-type"]
            if any(kind.startswith(STREAMS) for kind in kinds):
                self._is_stream = True
                self._instruments.streams.inc()
        await self._send(message)
        self._num_sent += len(message.get("body", b""))

    def end(self, scope: Scope) -> None:
        """The request has ended, well or not. Its route is known only now."""
        found = self._instruments
        if self._is_stream:
            found.streams.dec()
        method = scope["method"] if scope["method"] in METHODS else "other"
        labels = (method, getattr(scope.get("route"), "path", "none"))
        found.requests.labels(*labels, self._status).inc()
        found.seconds.labels(*labels).observe(time.perf_counter() - self._began)
        found.received.labels(*labels).inc(self._num_received)
        found.sent.labels(*labels).inc(self._num_sent)
