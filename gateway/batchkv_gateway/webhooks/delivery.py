"""Sends one event to one target: signed after Standard Webhooks, once, within ten seconds.

It uses no proxy and follows no redirect. TLS certificates are checked.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection

from batchkv_gateway.webhooks.events import Event
from batchkv_gateway.webhooks.targets import Target

SEND_SECONDS = 10.0  # for all of it


class DeliveryError(Exception):
    """The target did not accept an event. The text says why."""


def signature(secret: bytes, event_id: str, seconds: int, body: bytes) -> str:
    """The header ``webhook-signature``: HMAC-SHA256 of id, time and body."""
    signed = f"{event_id}.{seconds}.".encode() + body
    digest = hmac.new(secret, signed, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"


def deliver(target: Target, event: Event, secret: bytes, context: ssl.SSLContext | None) -> None:
    """Send an event. Raises DeliveryError unless the target answers with 2xx."""
    body, seconds = event.body.encode(), int(time.time())
    headers = {
        "content-type": "application/json",
        "user-agent": "batchkv",
        "webhook-id": event.event_id,
        "webhook-timestamp": str(seconds),
        "webhook-signature": signature(secret, event.event_id, seconds, body),
        "connection": "close",
    }
    connection, began = _connection(target, context), time.monotonic()
    try:
        connection.connect()  # the lookup of the name has no limit of time
        left = began + SEND_SECONDS - time.monotonic()
        if left <= 0:
            raise TimeoutError
        with _limited(connection, left):
            connection.request("POST", target.path, body, headers)
            status = connection.getresponse().status
    except (OSError, HTTPException) as fault:
        raise DeliveryError(_why(fault)) from fault
    finally:
        connection.close()
    if not 200 <= status < 300:
        raise DeliveryError(f"it answered with status {status}")


def _connection(target: Target, context: ssl.SSLContext | None) -> HTTPConnection:
    if not target.is_tls:
        return HTTPConnection(target.host, target.port, timeout=SEND_SECONDS)
    return HTTPSConnection(target.host, target.port, timeout=SEND_SECONDS, context=context)


@contextmanager
def _limited(connection: HTTPConnection, seconds: float) -> Iterator[None]:
    """End the connection after this time.

    The socket's own limit begins again with each byte that a slow peer sends.
    """
    was_ended = threading.Event()

    def end() -> None:
        was_ended.set()
        with suppress(OSError):
            connection.sock.shutdown(socket.SHUT_RDWR)

    ender = threading.Timer(seconds, end)
    ender.daemon = True
    ender.start()
    try:
        yield
    except (OSError, HTTPException) as fault:
        if was_ended.is_set():
            raise TimeoutError from fault
        raise
    finally:
        ender.cancel()


def _why(fault: Exception) -> str:
    if isinstance(fault, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({fault.verify_message})"
    if isinstance(fault, TimeoutError):
        return f"it did not answer within {SEND_SECONDS:g} s"
    return str(fault)[:200] or type(fault).__name__
