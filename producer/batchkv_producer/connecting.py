"""Makes a connected client, as the command line does."""

from __future__ import annotations

from batchkv_producer.client import Client
from batchkv_producer.server import connection


def connect(url: str | None = None) -> Client:
    """A client of the server that ``url``, else BATCHKV_REDIS_URL or BATCHKV_REDIS_URL_FILE names.

    Without any of these it is the embedded server's, which is started if it does not run. Raises
    ServerError when there is no connection.
    """
    return Client(connection.connect(url))
