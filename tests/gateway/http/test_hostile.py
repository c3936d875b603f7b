"""Requests that no client sends: none is served, crashes the gateway, or stops others."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from openai import OpenAI
from redis import Redis

from support.gateway import Gateway, running_gateway
from support.redis_server import RedisServer

HOST = "Host: 127.0.0.1\r\n"
GET = f"GET /v1/models HTTP/1.1\r\n{HOST}"
POST = f"POST /v1/batches HTTP/1.1\r\n{HOST}Content-Type: application/json\r\n"
FORM = f"POST /v1/files HTTP/1.1\r\n{HOST}Content-Type: multipart/form-data; boundary=B\r\n"
PURPOSE = '--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
PART = '--B\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n{}\r\n'
CHAT = f"POST /v1/chat/completions HTTP/1.1\r\n{HOST}Content-Type: application/json\r\n"
COMPLETION = CHAT.replace("/chat", "")
ID = "0" * 32


@pytest.fixture(scope="module")
def gateway(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    """A gateway with short times and few connections."""
    home = tmp_path_factory.mktemp("hostile") / "home"
    patch = {"HEADER_SECONDS": 0.5, "PIECE_SECONDS": 0.5, "MAX_CONNECTIONS": 20}
    flags = ("--max-file", "100KB")
    with running_gateway(redis_server.url, home, *flags, **patch) as found:
        yield found


MESSAGE = '{"messages": [{"role": "user", "content": "x"}], %s}'


def body(head: str, text: str, length: int | None = None) -> str:
    """A request with this body."""
    size = len(text.encode()) if length is None else length
    return f"{head}Content-Length: {size}\r\n\r\n{text}"


def batch(**fields: object) -> str:
    right = {"completion_window": "24h", "endpoint": "/v1/completions", "input_file_id": "f"}
    return body(POST, json.dumps({**right, **fields}))


REFUSED: dict[str, tuple[str | bytes, int]] = {
    # What is no HTTP, or HTTP that two readers understand differently.
    "noise": (b"\x00\x01\x02\r\n\r\n", 400),
    "TLS on a plain port": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    "HTTP/0.9": ("GET /v1/models\r\n\r\n", 400),
    "HTTP/2 preface": ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 403),
    "two lengths": (f"{POST}Content-Length: 2\r\nContent-Length: 3\r\n\r\n{{}}", 400),
    "a list of lengths": (f"{POST}Content-Length: 2, 3\r\n\r\n{{}}", 400),
    "a negative length": (f"{POST}Content-Length: -1\r\n\r\n", 400),
    "a length with a sign": (f"{POST}Content-Length: +2\r\n\r\n{{}}", 400),
    "length and chunks": (
        f"{POST}Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400
    ),
    "an unknown encoding": (f"{POST}Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400),
    "two encodings": (
        f"{POST}Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400
    ),
    "a bad size of a chunk": (f"{POST}Transfer-Encoding: chunked\r\n\r\nzz\r\n{{}}\r\n", 400),
    "a blank before the colon": (f"{GET}Authorization : x\r\n\r\n", 400),
    "a folded first header": ("GET / HTTP/1.1\r\n Host: a\r\n\r\n", 400),
    "NUL in a header": (f"{GET}X: a\x00b\r\n\r\n", 400),
    "a bare CR in a header": (f"{GET}X: a\rb\r\n\r\n", 400),
    "one header of 20 KB": (f"{GET}X: {'a' * 20_000}\r\n\r\n", 431),
    "a thousand headers": (GET + "X: aaaaaaaaaaaaaaaa\r\n" * 1000 + "\r\n", 431),
    "a path of 20 KB": (f"GET /{'a' * 20_000} HTTP/1.1\r\n{HOST}\r\n", 431),
    # Other names and other sites.
    "no host": ("GET /v1/models HTTP/1.1\r\n\r\n", 400),
    "two hosts": (f"{GET}Host: localhost\r\n\r\n", 400),
    "rebinding": ("GET /v1/models HTTP/1.1\r\nHost: evil.example:8080\r\n\r\n", 403),
    "a host like an address": (
        "GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1.evil.example\r\n\r\n", 403
    ),
    "a host with a user": ("GET /v1/models HTTP/1.1\r\nHost: evil@127.0.0.1\r\n\r\n", 403),
    "an empty host": ("GET /v1/models HTTP/1.1\r\nHost: \r\n\r\n", 403),
    "a host in HTTP/1.0": ("GET /v1/models HTTP/1.0\r\nHost: evil.example\r\n\r\n", 403),
    "another origin": (f"{GET}Origin: https://evil.example\r\n\r\n", 403),
    "no origin of a sandbox": (f"{POST}Origin: null\r\nContent-Length: 2\r\n\r\n{{}}", 403),
    "another site": (f"{GET}Sec-Fetch-Site: cross-site\r\n\r\n", 403),
    "a preflight": (
        f"OPTIONS /v1/files HTTP/1.1\r\n{HOST}Origin: https://evil.example\r\n"
        "Access-Control-Request-Method: POST\r\n\r\n", 403
    ),
    # Paths and ids.
    "an unknown path": (f"GET /v1/../etc/passwd HTTP/1.1\r\n{HOST}\r\n", 404),
    "an encoded path": (f"GET /v1/files/..%2f..%2fetc%2fpasswd HTTP/1.1\r\n{HOST}\r\n", 404),
    "an id with NUL": (f"GET /v1/files/file-%00 HTTP/1.1\r\n{HOST}\r\n", 404),
    "a guessed file": (f"GET /v1/files/file-{ID}/content HTTP/1.1\r\n{HOST}\r\n", 404),
    "a guessed batch": (f"POST /v1/batches/batch_{ID}/cancel HTTP/1.1\r\n{HOST}\r\n", 404),
    "an id with a glob": (f"DELETE /v1/files/file-* HTTP/1.1\r\n{HOST}\r\n", 404),
    "an unknown method": (f"PATCH /v1/files HTTP/1.1\r\n{HOST}\r\n", 405),
    "a page of -1": (f"GET /v1/files?limit=-1 HTTP/1.1\r\n{HOST}\r\n", 400),
    "a page in another script": (f"GET /v1/files?limit=%D9%A3 HTTP/1.1\r\n{HOST}\r\n", 400),
    "a page after a range": (f"GET /v1/files?after=%2B HTTP/1.1\r\n{HOST}\r\n", 400),
    # Bodies that are no JSON, too deep or too large.
    "no JSON": (body(POST, "{"), 400),
    "a list": (body(POST, "[]"), 400),
    "deep JSON": (body(POST, "[" * 100_000), 400),
    "no UTF-8": (f"{POST}Content-Length: 3\r\n\r\n".encode() + b'"\xff"', 400),
    "JSON as a form": (body(POST.replace("application/json", "text/plain"), "{}"), 400),
    "a metadata object": (batch(metadata={"a": {"b": 1}}), 400),
    "a window of a year": (batch(completion_window="365d"), 400),
    "a huge number": (batch(output_expires_after={"seconds": 10**300}), 400),
    "a JSON body of 2 MB": (body(POST, "x" * 2_000_000), 413),
    "a body said to be a terabyte": (body(POST, "", 10**12), 413),
    # Rows that a client waits for.
    "a chat that is no JSON": (body(CHAT, "{"), 400),
    "a deep chat": (body(CHAT, '{"messages":' + "[" * 100_000), 400),
    "a chat of half a character": (body(CHAT, '{"messages": ["\\ud800"]}'), 400),
    "a chat with markup in its model": (body(CHAT, MESSAGE % '"model": "<script>"'), 404),
    "a chat with a blank model": (body(CHAT, MESSAGE % '"model": "\\u0000"'), 400),
    "a chat template": (body(CHAT, MESSAGE % '"model": "m", "chat_template": "{{ 1 }}"'), 400),
    "a salt of another key": (body(CHAT, MESSAGE % '"model": "m", "cache_salt": "x"'), 400),
    "a stream of 2": (body(CHAT, MESSAGE % '"model": "m", "stream": 2'), 400),
    "a million answers": (body(CHAT, MESSAGE % '"model": "m", "n": 1000000'), 400),
    "129 prompts": (body(COMPLETION, json.dumps({"model": "m", "prompt": ["a"] * 129})), 400),
    "prompts in prompts": (body(COMPLETION, '{"model": "m", "prompt": [[["a"]], "b"]}'), 400),
    "no model at all": (body(COMPLETION, '{"prompt": "a"}'), 404),
    "a path of another server": (f"POST /tokenize HTTP/1.1\r\n{HOST}\r\n", 404),
    # Forms.
    "no boundary": (body(FORM.replace("; boundary=B", ""), PURPOSE), 400),
    "a boundary of 10 KB": (body(FORM.replace("=B", f"={'b' * 10_000}"), PURPOSE), 400),
    "a form without an end": (body(FORM, PURPOSE + PART), 400),
    "no file": (body(FORM, f"{PURPOSE}--B--\r\n"), 400),
    "no purpose": (body(FORM, f"{PART}--B--\r\n"), 400),
    "two files": (body(FORM, f"{PURPOSE}{PART}{PART}--B--\r\n"), 400),
    "two purposes": (body(FORM, f"{PURPOSE}{PURPOSE}{PART}--B--\r\n"), 400),
    "a bomb of parts": (body(FORM, PART.replace('"file"', '"x"') * 1000 + "--B--\r\n"), 400),
    "a bomb of headers": (
        body(FORM, "--B\r\n" + "X-A: b\r\n" * 5000 + "\r\n\r\n--B--\r\n"), 400
    ),
    "a header without an end": (body(FORM, "--B\r\nX: " + "a" * 60_000), 400),
    "a field of 50 KB": (body(FORM, PURPOSE.replace("batch", "b" * 50_000) + "--B--\r\n"), 400),
    "no form at all": (body(FORM, "hello"), 400),
    "a file over the limit": (
        body(FORM, f"{PURPOSE}{PART.replace('{}', 'x' * 120_000)}--B--\r\n"), 413
    ),
}  # fmt: skip


def exchange(gateway: Gateway, request: str | bytes, num_answers: int = 1) -> bytes:
    """What the gateway answers: so many answers, and all else that comes soon after them."""
    raw = request if isinstance(request, bytes) else request.encode("utf-8")
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=10) as connection:
        found = b""
        with suppress(OSError):  # it may have answered and closed already
            connection.sendall(raw)
        with suppress(OSError):
            while piece := connection.recv(65_536):
                found += piece
                if len(re.findall(rb"\r\n\r\n\{.*?\}", found, re.DOTALL)) >= num_answers:
                    connection.settimeout(0.02)
        return found


def test_no_hostile_request_is_served(
    gateway: Gateway, client: OpenAI, redis_connection: Redis, tmp_path: Path
) -> None:
    """Each is refused in OpenAI's shape; nothing is stored, and others are served after each."""
    assert len(REFUSED) >= 60
    for name, (request, status) in REFUSED.items():
        answer = exchange(gateway, request)
        head, _, text = answer.partition(b"\r\n\r\n")
        assert head.startswith(f"HTTP/1.1 {status} ".encode()), (name, answer[:300])
        assert answer.count(b"HTTP/1.1 ") == 1, (name, answer)
        error = json.loads(text)["error"]
        assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error"), name
        assert b"access-control" not in head.lower() and b"raceback" not in text, name
        assert gateway.process.poll() is None, name
    assert client.files.list().data == []
    assert not redis_connection.keys("batchkv:gateway:*")
    log = gateway.log.read_text()
    assert "Traceback" not in log, log


def test_slow_senders_do_not_stay(gateway: Gateway, client: OpenAI) -> None:
    """A connection without a request, with half a header, or half a body ends soon; others work."""
    beginnings = ("", "GET /v1/mod", f"{GET}X: ", body(POST, "{", 100), body(FORM, PURPOSE, 5000))
    slow = []
    for beginning in beginnings:
        connection = socket.create_connection(("127.0.0.1", gateway.port), timeout=10)
        connection.sendall(beginning.encode())
        slow.append(connection)
    assert client.models.list().data == []
    answers = []
    for connection in slow:
        found = b""
        while piece := connection.recv(4096):
            found += piece
        connection.close()
        answers.append(found[:13])
    assert answers == [b"", b"", b"", b"HTTP/1.1 408 ", b"HTTP/1.1 408 "]


def test_too_many_connections_are_closed(gateway: Gateway, client: OpenAI) -> None:
    """Those above the limit end at once; those below end in time, and then others are served."""
    many = [socket.create_connection(("127.0.0.1", gateway.port), timeout=10) for _ in range(30)]
    deadline = time.monotonic() + 10
    for connection in many:
        assert connection.recv(1) == b""
        connection.close()
    assert time.monotonic() < deadline
    assert client.models.list().data == []


def test_requests_in_one_connection_are_answered_in_order(gateway: Gateway, client: OpenAI) -> None:
    """Two requests that arrive as one piece get two answers, as HTTP allows."""
    assert client.models.list().data == []
    answer = exchange(gateway, f"{GET}\r\nGET /v1/no HTTP/1.1\r\n{HOST}\r\n", 2)
    assert answer.count(b"HTTP/1.1 200 ") == 1 and answer.count(b"HTTP/1.1 404 ") == 1
