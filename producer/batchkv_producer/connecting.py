"""Makes a connected client in the same way as the command line."""

from __future__ import annotations

from batchkv_producer.client import Client
from batchkv_producer.server import connection


def connect(url: str | None = None) -> Client:
    """A client of the server in ``url``, else in BATCHKV_REDIS_URL or BATCHKV_REDIS_URL_FILE.

    Without any of these it uses the embedded server, which is started if it does not run. Raises
    ServerError if there is no connection.
    """
    return Client(connection.connect(url))
