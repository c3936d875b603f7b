"""``GET /metrics``, in the format that the request asks for."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import Metric as Family
from prometheus_client.exposition import choose_encoder
from redis import Redis
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from batchkv_gateway.errors import FORBIDDEN, ApiError, invalid
from batchkv_gateway.metrics.collect import read_families
from batchkv_gateway.metrics.instruments import Instruments

ONLY_GATEWAY = "gateway"


class _Found:
    """Metrics that were read, as the library wants to have them."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Family]:
        return self._families


class MetricsRoutes:
    """The handler."""

    def __init__(self, connection: Redis, instruments: Instruments) -> None:
        self._connection, self._instruments = connection, instruments

    def routes(self) -> list[Route]:
        """The route of this room."""
        return [Route("/metrics", self.metrics, methods=["GET"])]

    def metrics(self, request: Request) -> Response:
        """All metrics. ``?only=gateway``: those of this process alone, without Redis."""
        if not request.state.reads_metrics:
            raise ApiError(
                FORBIDDEN,
                "this key may not read /metrics: `batchkv keys add NAME --metrics` makes one that "
                "may",
                code="forbidden",
            )
        only = request.query_params.get("only", "")
        if only not in ("", ONLY_GATEWAY):
            raise invalid(f"only={only[:80]!r}: it can be {ONLY_GATEWAY}", "only")
        families = [] if only else read_families(self._connection)
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        text = encode(_Found([*families, *self._instruments.collect()]))
        return Response(text, headers={"content-type": content_type})
