"""Webhooks: whom they call, what they say, and that each event arrives."""

from __future__ import annotations

import base64
import json
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from openai import InvalidWebhookSignatureError, OpenAI
from redis import Redis

from batchkv_gateway import redis_keys
from batchkv_gateway.scripts import take_due
from batchkv_gateway.secret import VARIABLE, read_secret
from batchkv_gateway.settings import GatewaySettings
from batchkv_gateway.webhooks import delivery
from batchkv_gateway.webhooks.delivery import DeliveryError, deliver
from batchkv_gateway.webhooks.events import KEEP_SECONDS, Event, commands, ended
from batchkv_gateway.webhooks.sender import Webhooks
from batchkv_gateway.webhooks.targets import Target, checked_targets
from batchkv_producer.errors import UsageError
from support.gateway import chat_file, chat_line, running_gateway, self_signed, working
from support.redis_server import RedisServer

SECRET_BYTES = bytes(range(32))
SECRET = "whsec_" + base64.b64encode(SECRET_BYTES).decode()
BATCH = "batch_" + "0" * 32
COUNTS = {"total": 2, "completed": 1, "failed": 1}


class Receiver:
    """A server that keeps what it gets. ``status_of`` answers for the number of a request."""

    def __init__(self, status_of: Callable[[str, int], int]) -> None:
        self.got: list[tuple[str, dict[str, str], bytes]] = []
        self._lock = threading.Lock()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                with receiver._lock:
                    receiver.got.append((self.path, headers, body))
                    number = len(
                        [h for _, h, _ in receiver.got if h["webhook-id"] == headers["webhook-id"]]
                    )
                self.send_response(status_of(headers["webhook-id"], number))
                self.send_header("location", "/other")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/hook?to=me"

    def wait(self, count: int) -> None:
        deadline = time.monotonic() + 30
        while len(self.got) < count:
            assert time.monotonic() < deadline, self.got
            time.sleep(0.02)


@contextmanager
def receiving(status_of: Callable[[str, int], int] = lambda *_: 200) -> Iterator[Receiver]:
    receiver = Receiver(status_of)
    thread = threading.Thread(target=receiver.server.serve_forever, args=[0.01])
    thread.start()
    try:
        yield receiver
    finally:
        receiver.server.shutdown()
        thread.join()
        receiver.server.server_close()


def unwrapped(got: tuple[str, dict[str, str], bytes]) -> Any:
    """The event as OpenAI's client reads it, which checks the signature and the time."""
    with OpenAI(api_key="x", webhook_secret=SECRET) as client:
        return client.webhooks.unwrap(got[2], got[1])


def only(url: str) -> Target:
    (target,) = checked_targets([url])
    return target


def wait_empty(connection: Redis, name: str) -> None:
    deadline = time.monotonic() + 30
    while connection.exists(redis_keys.outbox(name), redis_keys.events(name)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_each_end_of_a_batch_is_told_once(
    redis_server: RedisServer,
    redis_connection: Redis,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two gateways and a receiver that fails first: an event is sent again and accepted once."""
    monkeypatch.setenv(VARIABLE, SECRET)
    rows = {"completed": chat_file("a", "b"), "failed": b"{\n", "cancelled": chat_file("c")}
    with receiving(lambda _, number: 500 if number == 1 else 204) as receiver, ExitStack() as stack:
        flags = ("--webhook", receiver.url)
        both = [
            stack.enter_context(
                running_gateway(redis_server.url, tmp_path / "home", *flags, PAUSES=[0])
            )
            for _ in range(2)
        ]
        client = stack.enter_context(both[0].client(max_retries=0))
        made = {}
        for name, content in rows.items():
            file = client.files.create(file=("rows", content), purpose="batch")
            made[name] = client.batches.create(
                completion_window="24h", endpoint="/v1/chat/completions", input_file_id=file.id
            ).id
        client.batches.cancel(made["cancelled"])
        stack.enter_context(working(redis_server.url))
        receiver.wait(6)
        wait_empty(redis_connection, only(receiver.url).name)
        assert len(receiver.got) == 6
        for name, batch_id in made.items():
            one, two = [got for got in receiver.got if batch_id.encode() in got[2]]
            assert one[0] == "/hook?to=me" and one[2] == two[2]
            event = unwrapped(two)
            assert event.type == f"batch.{name}" and event.data.id == batch_id
            assert unwrapped(one).id == event.id == two[1]["webhook-id"]
            body = json.loads(two[2])
            batch = client.batches.retrieve(batch_id)
            assert batch.request_counts is not None
            assert body["data"] == {
                "id": batch_id, "status": name, "request_counts": batch.request_counts.to_dict()
            }  # fmt: skip
            assert body.keys() == {"id", "object", "created_at", "type", "data"}
        log = "".join(each.log.read_text() for each in both)
        assert "to=me" not in log and "evt_" in log  # the path of a URL may be a secret
    forged = (
        receiver.got[0][0],
        receiver.got[0][1],
        receiver.got[0][2].replace(b"batch", b"catch"),
    )
    with pytest.raises(InvalidWebhookSignatureError):
        unwrapped(forged)


def test_an_event_survives_a_kill(
    redis_server: RedisServer,
    redis_connection: Redis,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A gateway that is killed after it has sent an event: the next one sends it again."""
    monkeypatch.setenv(VARIABLE, SECRET)
    with receiving() as receiver:
        way = (redis_server.url, tmp_path / "home", "--webhook", receiver.url)
        patch: Any = {"TAKEN_SECONDS": 1}
        place = "batchkv_gateway.webhooks.sender:Webhooks._drop"
        with running_gateway(*way, die_at=place, **patch) as gateway, gateway.client() as client:
            file = client.files.create(file=("rows", f"{chat_line('a')}\n{{"), purpose="batch")
            client.batches.create(
                completion_window="24h", endpoint="/v1/chat/completions", input_file_id=file.id
            )
            gateway.wait_killed()
        assert len(receiver.got) == 1
        target = only(receiver.url)
        webhooks = Webhooks(redis_connection, [target], SECRET_BYTES)
        deadline = time.monotonic() + 30
        while not webhooks.send_next(target):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        wait_empty(redis_connection, target.name)
    first, second = map(unwrapped, receiver.got)
    assert first == second and first.type == "batch.failed"


def test_only_2xx_is_accepted_and_no_redirect_followed(
    redis_connection: Redis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Everything else is tried again, later each time, for a day. No variable names a proxy."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    answers = {"number": 302}
    with receiving(lambda *_: answers["number"]) as receiver:
        target = only(receiver.url)
        webhooks = Webhooks(redis_connection, [target], SECRET_BYTES)
        outbox, events = redis_keys.outbox(target.name), redis_keys.events(target.name)

        def due(seconds: float) -> None:
            (event_id,) = redis_connection.zrange(outbox, 0, -1)  # type: ignore[misc]
            redis_connection.zadd(outbox, {event_id: seconds})

        def put(event: Event) -> None:
            for command in commands(event, [target.name]):
                redis_connection.execute_command(*command)  # type: ignore[no-untyped-call]

        assert not webhooks.send_next(target)
        now = int(time.time())
        put(ended(BATCH, "expired", COUNTS, now))
        taken = [take_due(redis_connection, outbox, events, 60) for _ in range(2)]
        assert taken[0] is not None and taken[1] is None  # so two gateways do not both send it
        due(now - 1)
        pauses = []
        for number in (302, 404, 500):
            answers["number"] = number
            assert webhooks.send_next(target) and not webhooks.send_next(target)
            ((_, at),) = redis_connection.zrange(outbox, 0, -1, withscores=True)  # type: ignore[misc]
            pauses.append(at - time.time())
            due(now - 1)
        assert pauses == sorted(pauses) and pauses[0] > 1
        answers["number"] = 200
        assert webhooks.send_next(target) and not redis_connection.exists(outbox, events)
        assert len(receiver.got) == 4 and {path for path, _, _ in receiver.got} == {"/hook?to=me"}
        answers["number"] = 500
        put(ended(BATCH, "expired", COUNTS, now - KEEP_SECONDS))
        with caplog.at_level(logging.WARNING):
            assert webhooks.send_next(target)
        assert "dropped after a day" in caplog.text and not redis_connection.exists(outbox, events)
        for damaged in ("", "[]", "[1,2,3]", "{"):
            redis_connection.hset(events, "evt_x", damaged)
            redis_connection.zadd(outbox, {"evt_x": now - 1})
            assert webhooks.send_next(target) and not redis_connection.exists(outbox, events)
    put(ended(BATCH, "expired", COUNTS, now))
    assert webhooks.send_next(target) and redis_connection.zcard(outbox) == 1  # nobody listens
    assert 0 < int(redis_connection.ttl(outbox)) <= 2 * KEEP_SECONDS  # type: ignore[arg-type]


def test_a_slow_target_is_left_and_a_certificate_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silence, an answer that comes byte by byte, and an unknown certificate each end in time."""
    monkeypatch.setattr(delivery, "SEND_SECONDS", 0.3)
    event = ended(BATCH, "completed", COUNTS, int(time.time()))
    is_over = threading.Event()

    def drip(listening: socket.socket) -> None:
        peer, _ = listening.accept()
        with peer:
            while not is_over.wait(0.05):
                try:
                    peer.sendall(b"H")
                except OSError:
                    return

    with socket.create_server(("127.0.0.1", 0)) as listening:
        target = only(f"http://127.0.0.1:{listening.getsockname()[1]}")
        for is_dripping in (False, True):
            thread = threading.Thread(target=drip, args=[listening])
            if is_dripping:
                listening.accept()[0].close()
                thread.start()
            with pytest.raises(DeliveryError, match=r"within 0\.3 s"):
                deliver(target, event, SECRET_BYTES, None)
        is_over.set()
        thread.join()
    cert, key = self_signed(tmp_path)
    monkeypatch.setattr(delivery, "SEND_SECONDS", 10.0)
    with receiving() as receiver:
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(cert, key)
        receiver.server.socket = server.wrap_socket(receiver.server.socket, server_side=True)
        target = only(receiver.url.replace("http:", "https:"))
        with pytest.raises(DeliveryError, match="not trusted"):
            deliver(target, event, SECRET_BYTES, ssl.create_default_context())
        deliver(target, event, SECRET_BYTES, ssl.create_default_context(cafile=cert))
    assert unwrapped(receiver.got[0]).type == "batch.completed"


def test_only_safe_targets_and_whole_secrets_are_accepted(tmp_path: Path) -> None:
    """http is for this machine alone. A secret is needed, long enough, and closed to others."""
    for url in ("https://a.example", "https://a.example:8443/x?y=z", "http://localhost:1/x",
                "http://[::1]:5/"):  # fmt: skip
        assert GatewaySettings.read({"webhooks": url}, {VARIABLE: SECRET}).webhooks == (url,)
        assert only(url).path.startswith("/")
    assert only("https://a.example/s").port == 443 and len(checked_targets(["https://a"] * 2)) == 1
    for url in ("http://a.example", "http://10.0.0.1/", "ftp://a", "a.example", "https://",
                "https://u:p@a.example", "https://a.example/#x", "https://a.example/ b",
                "https://a.example/\r\nx", "https://a:x", "https://a/" + "x" * 2000):  # fmt: skip
        with pytest.raises(UsageError, match="--webhook") as caught:
            checked_targets([url])
        assert "p@" not in str(caught.value)
    with pytest.raises(UsageError, match=VARIABLE):
        GatewaySettings.read({"webhooks": "https://a.example"}, {})
    short = "whsec_" + base64.b64encode(b"x" * 23).decode()
    for text in ("x", SECRET[6:], "whsec_", short, "whsec_!", SECRET + "A" * 100):
        with pytest.raises(UsageError, match="openssl"):
            read_secret({VARIABLE: text})
    path = tmp_path / "secret"
    path.write_text(f"{SECRET}\n")
    path.chmod(0o640)
    named = {f"{VARIABLE}_FILE": str(path)}
    with pytest.raises(UsageError, match="chmod 600"):
        read_secret(named)
    path.chmod(0o600)
    assert read_secret(named) == read_secret({VARIABLE: SECRET}) == SECRET_BYTES
    with pytest.raises(UsageError, match="keep one"):
        read_secret({**named, VARIABLE: SECRET})
    with pytest.raises(UsageError, match="No such file"):
        read_secret({f"{VARIABLE}_FILE": str(tmp_path / "none")})
    assert SECRET not in repr(GatewaySettings.read({}, {VARIABLE: SECRET}))
