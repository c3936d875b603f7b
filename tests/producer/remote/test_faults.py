"""The client of a gateway under faults of networks and servers: each has a sentence and an end."""

from __future__ import annotations

import shutil
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from batchkv_producer.errors import (
    AwayError,
    BatchkvError,
    InputFileError,
    ServerError,
    UsageError,
)
from batchkv_producer.intake.source import Inputs
from batchkv_producer.remote import transport as transports
from batchkv_producer.remote.address import Address, address_of
from batchkv_producer.remote.body import InputBody
from batchkv_producer.remote.client import RemoteClient
from batchkv_producer.remote.opening import connect_gateway
from batchkv_producer.remote.transport import Transport
from batchkv_producer.wire.batch_options import BatchOptions
from batchkv_producer.wire.redis_keys import queue_name
from support.gateway import Gateway, running_gateway, self_signed, working
from support.http_faults import Fault, HttpFaults
from support.redis_server import RedisServer

BATCHES = r"/batchkv/v1/batches"
ROWS = [{"custom_id": str(number), "prompt": f"row {number}"} for number in range(40)]


@pytest.fixture(scope="module")
def gateway(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    """One gateway for all tests."""
    with running_gateway(redis_server.url, tmp_path_factory.mktemp("gateway") / "home") as found:
        yield found


@contextmanager
def answering(raw: bytes, *, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """A server that answers each request with these bytes, or closes if there are none."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with suppress(OSError), client, _wrapped(client, tls) as stream:
                stream.recv(2**16)
                stream.sendall(raw)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def _wrapped(client: socket.socket, tls: ssl.SSLContext | None) -> socket.socket:
    return tls.wrap_socket(client, server_side=True) if tls else client


def answer(status: str, body: str, *headers: str) -> bytes:
    """An answer of HTTP."""
    head = "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers])
    return f"{head}\r\n\r\n{body}".encode()


def message_of(url: str, kind: type[BatchkvError] = ServerError) -> str:
    """The sentence with which a connection ends."""
    with pytest.raises(kind) as caught:
        connect_gateway(url)
    return str(caught.value)


REFUSED = '{"error": {"message": "not here", "code": "%s"}}'


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (answer("200 OK", "<html>hello</html>"), "is no gateway of this batchkv"),
        (answer("200 OK", "[]"), "is no gateway of this batchkv"),
        (answer("404 Not Found", "<html>"), "is no gateway of batchkv (it answers 404"),
        (answer("404 Not Found", REFUSED % "unknown_url"), "an older version of `batchkv serve`"),
        (answer("302 Found", "", "Location: https://x/"), "is no gateway of batchkv"),
        (answer("403 Forbidden", REFUSED % "unknown_host"), "refuses the request: not here"),
        (answer("500 Internal", REFUSED % ""), "failed: not here (500)"),
        (answer("502 Bad Gateway", "<html>"), "is not available: it answers 502"),
        (answer("503 Busy", REFUSED % "busy"), "is not available: not here"),
        (answer("200 OK", "{}").replace(b": 2", b": 9"), "cut its answer off"),
        (b"-ERR unknown command\r\n", "is no gateway of this batchkv"),
        (b"", "closed the connection"),
    ],
)
def test_a_wrong_server_is_named(raw: bytes, words: str) -> None:
    """HTML, other status codes, cut answers and servers of other protocols each have a sentence."""
    with answering(raw) as url:
        found = message_of(url)
    assert words in found and url in found


def test_no_server_and_wrong_urls_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed port, an unknown name, a server that says nothing, and URLs that cannot be one."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        monkeypatch.setattr(transports, "REPLY_SECONDS", 0.2)
        assert "does not answer" in message_of(f"http://127.0.0.1:{port}")
    assert "is `batchkv serve` running there?" in message_of(f"http://127.0.0.1:{port}")
    assert "no machine by that name" in message_of("http://nobody.invalid")
    for url in ("http://", "http://h:99999", "http://h/?a=1", "http://h:1/a b", "http://k@h"):
        assert "URL" in message_of(url, UsageError), url
    assert address_of("HTTP://h/v1/", {}) == Address("http", "h", 80)
    assert address_of("https://h:1/a/batchkv/v1", {}).url == "https://h:1/a"
    for key in ("a b", "ü", "a" * 300):
        with pytest.raises(UsageError, match="BATCHKV_API_KEY is no key"):
            address_of("http://h", {"BATCHKV_API_KEY": key})


def test_proxies_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """http_proxy leads to other machines, not to this one; no_proxy goes without it."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert address_of("http://hub.example", {}).proxy == ("127.0.0.1", 9)
    assert address_of("http://127.0.0.1", {}).proxy is None
    assert "through the proxy 127.0.0.1:9" in message_of("http://hub.example")
    with answering(answer("200 OK", '{"memory": 3}')) as url:
        monkeypatch.setenv("http_proxy", url)
        connect_gateway("http://hub.example")
    monkeypatch.setenv("no_proxy", "hub.example")
    assert address_of("http://hub.example", {}).proxy is None
    monkeypatch.setenv("http_proxy", "socks5://127.0.0.1")
    with pytest.raises(UsageError, match="http_proxy is socks5"):
        address_of("http://other.example", {})


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_tls_has_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown authority, another name, plain HTTP: a sentence each. BATCHKV_CA_FILE helps."""
    cert, key = self_signed(tmp_path)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(cert, key)
    with answering(answer("200 OK", '{"memory": null}'), tls=server) as url:
        assert "Name the file of your authority in BATCHKV_CA_FILE" in message_of(url)
        assert "closed the connection" in message_of(url.replace("https", "http"))
        monkeypatch.setenv("BATCHKV_CA_FILE", str(cert))
        connect_gateway(url)
        assert "it is for another name" in message_of(url.replace("127.0.0.1", "localhost"))
    with answering(answer("200 OK", "{}")) as url:
        assert "is it http:// instead" in message_of(url.replace("http", "https"))
        monkeypatch.setenv("BATCHKV_CA_FILE", str(tmp_path / "none.pem"))
        assert "BATCHKV_CA_FILE names" in message_of(url.replace("http", "https"), UsageError)


@pytest.mark.parametrize("kind", ["unsent", "lost", "cut", "refused"])
def test_a_submit_that_is_cut_off_is_repeated(
    gateway: Gateway, redis_connection: Redis, kind: Any
) -> None:
    """Whenever the connection ends, the second request joins the batch of the first."""
    notes: list[str] = []
    with HttpFaults(gateway.port) as proxy:
        client = connect_gateway(proxy.url, notes.append)
        proxy.plan("POST", BATCHES, Fault(kind, 503))
        made = client.submit(ROWS, model="fake")
        assert proxy.is_done and made.total == len(ROWS)
        proxy.plan("GET", f"{BATCHES}/.*", Fault(kind, 503))
        proxy.plan("POST", f"{BATCHES}/.*", Fault(kind, 503))
        assert client.status(made.batch_id).queued == len(ROWS)
        assert client.cancel(made.batch_id) in (0, len(ROWS))
        assert client.status(made.batch_id).canceled == len(ROWS) and proxy.is_done
    assert redis_connection.llen(f"rq:queue:{queue_name('fake')}") == 0
    assert len(notes) == 3 and all("Trying again" in note for note in notes)


def test_a_fresh_submit_is_not_repeated(gateway: Gateway, redis_connection: Redis) -> None:
    """With --fresh a second request would make a second batch, so the command says what to do."""
    with HttpFaults(gateway.port) as proxy:
        client = connect_gateway(proxy.url)
        proxy.plan("POST", BATCHES, Fault("lost"))
        with pytest.raises(ServerError, match="see `batchkv list` before"):
            client.submit(ROWS, model="fake", options=BatchOptions(fresh=True))
        assert client.count_batches() == 1


def test_results_go_on_where_they_were_cut(
    gateway: Gateway, redis_url: str, redis_connection: Redis
) -> None:
    """A stream that is cut again and again has each row once, in both orders, and followed."""
    with HttpFaults(gateway.port) as proxy:
        client = connect_gateway(proxy.url)
        batch = client.submit(ROWS, model="fake").batch_id
        with working(redis_url):
            proxy.plan("GET", f"{BATCHES}/.*/results", *[Fault("cut")] * 3)
            rows = list(client.results(batch, follow=True))
        assert sorted(row.line for row in rows) == list(range(1, len(ROWS) + 1))
        assert rows[0].result.text.startswith("answer to row")
        for order in ("finish", "input"):
            proxy.plan("GET", f"{BATCHES}/.*/results", Fault("cut"), Fault("cut"), Fault("unsent"))
            again = list(client.results(batch, order=order))  # type: ignore[arg-type]
            assert len(again) == len(ROWS) and proxy.is_done
        assert [row.line for row in again] == list(range(1, len(ROWS) + 1))


def test_nothing_waits_for_a_gateway_that_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are repeated for a bounded time, and then end with the sentence."""
    with answering(answer("503 Busy", REFUSED % "busy", "Retry-After: 5")) as url:
        notes: list[str] = []
        client = RemoteClient(Transport(address_of(url), notes.append))
        client.transport.retry_seconds = 0.3
        with pytest.raises(AwayError):
            client.status("0123456789abcdef")
        assert not notes  # it told of no wait: five seconds are too long
    monkeypatch.setattr("batchkv_producer.retry.MAX_AWAY_SECONDS", 0.3)
    with pytest.raises(AwayError):
        client.wait("0123456789abcdef")


@pytest.mark.parametrize("num_files", [1, 2])
def test_a_file_that_grows_before_it_is_sent_is_not_sent_whole(
    tmp_path: Path, num_files: int
) -> None:
    """The sizes were told before. A second file is read only when the first was sent."""
    files = [tmp_path / f"{number}.jsonl" for number in range(num_files)]
    for file in files:
        file.write_text('{"prompt": "x"}\n' * 3)
    body = InputBody.of(Inputs(tuple(Inputs.of(file).pieces[0] for file in files)))
    assert sum(map(len, body.pieces())) == body.num_bytes  # and again, as after a lost answer
    with files[-1].open("a") as out:
        out.write('{"prompt": "y"}\n')
    sent = []
    with pytest.raises(InputFileError, match="changed while it was read"):
        sent.extend(body.pieces())
    assert sum(map(len, sent)) < body.num_bytes
