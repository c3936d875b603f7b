"""Makes a connected client in the same way as the command line."""

from __future__ import annotations

from batchkv_producer.client import Client
from batchkv_producer.interface import BatchClient
from batchkv_producer.remote.opening import connect_gateway
from batchkv_producer.server import connection


def connect(url: str | None = None) -> BatchClient:
    """A client of the server in ``url``, else in BATCHKV_REDIS_URL or BATCHKV_REDIS_URL_FILE.

    ``http://`` and ``https://`` name a gateway, and BATCHKV_API_KEY its key. Without any URL it
    uses the embedded server, which is started if it does not run. Raises ServerError if there is no
    connection.
    """
    named = connection.resolve_url(url)
    if named is not None and connection.is_gateway(named):
        return connect_gateway(named)
    return Client(connection.connect(url))
