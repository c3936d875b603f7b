"""How large requests may be."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

from httpx2 import Client as HttpClient
from redis import Redis

from support.gateway import Gateway, running_gateway
from support.redis_server import RedisServer

MIB = 2**20
CALL = "chat/completions"


def body(num_bytes: int) -> bytes:
    """A call of so many bytes, of a model that nobody serves."""
    call = {"model": "nobody", "messages": [{"role": "user", "content": ""}]}
    raw = json.dumps(call).encode()
    return raw.replace(b'""', b'"' + b"x" * (num_bytes - len(raw)) + b'"')


def post(gateway: Gateway, path: str, content: bytes) -> int:
    headers = {"Content-Type": "application/json"}
    with HttpClient(timeout=30) as http:
        found: int = http.post(
            f"{gateway.url}/{path}", content=content, headers=headers
        ).status_code
    return found


def test_a_call_may_be_as_large_as_a_line(gateway: Gateway, redis_connection: Redis) -> None:
    """A prompt of a long context is read; other bodies have at most 1 MiB."""
    assert post(gateway, CALL, body(15 * MIB)) == 404  # it was read: no worker has its model
    assert post(gateway, CALL, body(17 * MIB)) == 413
    assert post(gateway, "batches", body(2 * MIB)) == 413


def test_large_calls_have_a_room_of_memory(redis_server: RedisServer, tmp_path: Path) -> None:
    """When it is full another large call is told to come again, and small ones are served. It is
    free again when a client has left."""
    patch = {"MAX_CALLS_BYTES": 2 * MIB}
    with running_gateway(redis_server.url, tmp_path / "home", **patch) as gateway:
        whole = body(3 * MIB)
        head = f"POST /v1/{CALL} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(whole)}\r\n\r\n"
        until, status = time.monotonic() + 10, 404
        while status == 404:  # the room was still free, or the slow one came second and was refused
            assert time.monotonic() < until
            with socket.create_connection(("127.0.0.1", gateway.port)) as slow:
                slow.sendall(head.encode() + whole[:-9])
                time.sleep(0.2)
                if (status := post(gateway, CALL, whole)) == 503:
                    assert post(gateway, CALL, body(1000)) == 404
        assert status == 503
        until = time.monotonic() + 10
        while post(gateway, CALL, whole) != 404:
            assert time.monotonic() < until
