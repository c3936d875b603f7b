"""What every answer has, and errors that come before any route."""

from __future__ import annotations

import socket

import httpx2
import pytest
from openai import OpenAI
from redis import Redis

from batchkv_gateway.keys.store import KeyStore
from support.gateway import Gateway


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/models", 200),
        ("GET", "/v1/models/none", 404),
        ("GET", "/v1/none", 404),
        ("PUT", "/v1/files", 405),
        ("POST", "/v1/batches", 400),
        ("GET", "/", 200),
    ],
)
def test_every_answer_names_its_request(
    gateway: Gateway, client: OpenAI, method: str, path: str, status: int
) -> None:
    """Clients show the id beside an error. Each request has another one."""
    url = f"http://127.0.0.1:{gateway.port}{path}"
    ids = {httpx2.request(method, url).headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3 and all(one.startswith("req_") for one in ids)
    assert httpx2.request(method, url).status_code == status


def test_what_is_not_http_has_an_id_too(gateway: Gateway, client: OpenAI) -> None:
    with socket.create_connection(("127.0.0.1", gateway.port), 10) as plain:
        plain.sendall(b"GARBAGE\r\n\r\n")
        answer = b"".join(iter(lambda: plain.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 400 ") and b"x-request-id: req_" in answer.lower()


@pytest.mark.parametrize(
    ("path", "methods"),
    [("/v1/files", "GET, HEAD, POST"), ("/v1/files/x", "DELETE, GET, HEAD")],
)
def test_all_methods_of_a_path_are_named(
    gateway: Gateway, client: OpenAI, path: str, methods: str
) -> None:
    """Each has a route of its own."""
    found = httpx2.put(f"http://127.0.0.1:{gateway.port}{path}")
    assert (found.status_code, found.headers["allow"]) == (405, methods)


def test_a_missing_key_is_asked_for(
    gateway: Gateway, client: OpenAI, redis_connection: Redis
) -> None:
    """In the way of HTTP, too."""
    KeyStore(redis_connection).add("one")
    found = httpx2.get(f"{gateway.url}/models")
    assert (found.status_code, found.headers["www-authenticate"]) == (401, "Bearer")


def test_an_offer_of_another_protocol_is_passed_over(gateway: Gateway, client: OpenAI) -> None:
    """Java's client offers HTTP/2 with each request. The log says nothing of it."""
    before = gateway.log.read_text()
    offer = b"connection: Upgrade, HTTP2-Settings, close\r\nupgrade: h2c\r\nhttp2-settings: AA\r\n"
    with socket.create_connection(("127.0.0.1", gateway.port), 10) as plain:
        plain.sendall(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n" + offer + b"\r\n")
        answer = b"".join(iter(lambda: plain.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert gateway.log.read_text() == before
