"""Faulty S3 servers: wrong or slow answers are a TierError at worst."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from batchkv_cache_store.blocks.seal import Buffer
from batchkv_cache_store.errors import TierError
from cache_store.places import MIB, name, objects_tier

pytest.importorskip("boto3")
from batchkv_cache_store.tiers import objects

_LISTING = (
    b'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">%s</ListBucketResult>'
)
Answer = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def _server(answer: Answer) -> Iterator[str]:
    """The URL of a server that gives this answer to every request."""

    class Handler(BaseHTTPRequestHandler):
        def _any(self) -> None:
            answer(self)

        do_GET = do_HEAD = do_PUT = do_DELETE = _any

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def _says(body: bytes, status: int = 200, **headers: str) -> Answer:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            request.send_header(key.replace("_", "-"), value)
        request.end_headers()
        request.wfile.write(body)

    return answer


def _redirects(request: BaseHTTPRequestHandler) -> None:
    _says(b"", 302, Location=f"http://{request.headers['Host']}/again")(request)


@pytest.mark.parametrize(
    "answer",
    [
        _redirects,
        _says(_LISTING % b"<Contents><Key>p/1/a</Key></Contents>"),
        _says(_LISTING % b"<Contents><Size>7</Size></Contents>"),
        _says(_LISTING % b"<Contents><Key>p/1/a</Key><Size>many</Size></Contents>"),
        _says(b"<html>Welcome to our hotel</html"),
    ],
    ids=["redirects to itself", "no size", "no key", "a size in words", "a page"],
)
def test_answers_that_are_not_s3_are_trouble_of_the_tier(answer: Answer) -> None:
    """A server with senseless answers is a TierError, which ends no worker at its start."""
    with _server(answer) as url:
        tier = objects_tier(url, "p/")
        for call in (tier.check, tier.stats, lambda: list(tier.iter_names())):
            with pytest.raises(TierError):
                call()
        tier.close()


def test_a_body_without_a_length_is_read() -> None:
    """A block that comes in chunks, without its length, is read."""

    def chunked(request: BaseHTTPRequestHandler) -> None:
        request.protocol_version = "HTTP/1.1"
        request.send_response(200)
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        request.wfile.write(b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")

    with _server(chunked) as url:
        tier = objects_tier(url, "p/")
        assert tier.get_many([name(1)], {name(1): 5}) == {name(1): b"abcde"}
        tier.close()


def test_a_body_cut_short_is_trouble_and_no_damaged_block() -> None:
    """A connection that breaks in a body is no damaged block, so the block is not deleted."""

    def cut(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Length", "1000")
        request.end_headers()
        request.wfile.write(b"x" * 300)

    with _server(cut) as url:
        tier = objects_tier(url, "p/")
        gets: list[Callable[[], dict[str, Buffer]]] = [
            lambda: tier.get_many([name(1)], {name(1): 1000}),
            lambda: tier.get_many([name(1)]),
            lambda: tier.get_heads([name(1)], 500),
        ]
        for get in gets:
            with pytest.raises(TierError, match="cut after 300 bytes"):
                get()
        assert tier.get_heads([name(1)], 200) == {name(1): b"x" * 200}
        tier.close()


@contextmanager
def _dripping() -> Iterator[str]:
    """The URL of a server that sends a byte now and then, without end."""
    is_over = threading.Event()

    def drip(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Length", str(MIB))
        request.end_headers()
        with suppress(OSError):
            while not is_over.wait(0.05):
                request.wfile.write(b" ")

    with _server(drip) as url:
        try:
            yield url
        finally:
            is_over.set()


def test_a_server_that_drips_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer of a byte now and then ends at its limit, though the socket's timeouts do not."""
    monkeypatch.setattr(objects, "ASK_SECONDS", 0.3)
    with _dripping() as url:
        tier = objects_tier(url, "p/")
        calls = [tier.check, lambda: tier.get_many([name(1)]), lambda: list(tier.iter_names())]
        for call in calls:
            with pytest.raises(TierError, match="no whole answer"):
                call()
        tier.close()


_LEAVES = """
import sys, threading
from cache_store.places import name, objects_tier
from batchkv_cache_store.tiers import objects
from batchkv_cache_store.errors import TierError
objects.ASK_SECONDS = 0.3
tier = objects_tier(sys.argv[1], "p/")
try:
    tier.get_many([name(1)])
except TierError:
    tier.close()
    print("closed", flush=True)
"""


def test_a_request_that_hangs_keeps_no_process() -> None:
    """A process can end while a request of its tier still waits for its answer."""
    with _dripping() as url:
        ran = subprocess.run(
            [sys.executable, "-c", _LEAVES, url],
            env={"PYTHONPATH": ":".join(sys.path), "PATH": ""},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert ran.stdout == "closed\n", ran.stderr


def test_a_bucket_that_never_ends_is_not_counted_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing without end stops at its limit, and nothing is written."""
    monkeypatch.setattr(objects, "COUNT_SECONDS", 0.2)

    def page(request: BaseHTTPRequestHandler) -> None:
        if request.command == "HEAD":
            return _says(b"", 404)(request)
        token = b"<NextContinuationToken>%d</NextContinuationToken>" % time.monotonic_ns()
        return _says(_LISTING % (b"<IsTruncated>true</IsTruncated>" + token))(request)

    with _server(page) as url:
        tier = objects_tier(url, "p/")
        tier.check()
        for call in (tier.stats, lambda: tier.put(name(1), [b"x"])):
            with pytest.raises(TierError, match="cannot be counted"):
                call()
        tier.close()
