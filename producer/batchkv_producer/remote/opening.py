"""Opens a client of a gateway."""

from __future__ import annotations

from collections.abc import Callable

from batchkv_producer.remote.address import address_of
from batchkv_producer.remote.client import RemoteClient
from batchkv_producer.remote.transport import Transport


def connect_gateway(url: str, note: Callable[[str], None] = lambda _: None) -> RemoteClient:
    """A client of the gateway at this URL, after a first answer.

    The key is in BATCHKV_API_KEY, and BATCHKV_CA_FILE names who signed the certificate. ``note``
    gets a sentence when the gateway is away and requests are repeated. Raises UsageError and
    ServerError.
    """
    transport = Transport(address_of(url), note)
    transport.connect()
    return RemoteClient(transport)
