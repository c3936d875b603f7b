"""The same attacks on every route: strangers, other keys, other sites, smuggled and huge bodies.

The routes are those of the application, so that a new one is attacked, too.
"""

from __future__ import annotations

import json
import re
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.client import HTTPConnection, HTTPResponse

import pytest
from redis import Redis

from batchkv_gateway.assembly import routes_of, running_parts
from batchkv_gateway.keys.store import KeyStore
from batchkv_gateway.settings import GatewaySettings
from support.gateway import Gateway, chat_file, chat_line, running_gateway
from support.redis_server import RedisServer

# What the page needs before anybody has logged in. None of it shows what somebody made.
OPEN = {"/", "/page/session", "/page/login", "/page/exchange", "/page/logout"}
ASSET = re.compile(r"/page/[a-z/]+\.(js|css|svg)")
GOOD_SITE = "https://good.example"
EVIL_SITE = "https://evil.example"
MARKUP = "<script>alert(1)</script>"
HUGE = str(10**12)

Route = tuple[str, str]
Make = Callable[[str], "Caller"]


@pytest.fixture(scope="module")
def gateway(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    """A gateway that pages of one site may call."""
    home = tmp_path_factory.mktemp("hostile") / "home"
    flags = ("--max-file", "100KB", "--cors", GOOD_SITE)
    with running_gateway(redis_server.url, home, *flags) as found:
        yield found


@pytest.fixture
def routes(redis_connection: Redis, home: object, monkeypatch: pytest.MonkeyPatch) -> list[Route]:
    """(method, path) of every route."""
    monkeypatch.setenv("BATCHKV_HOME", str(home))
    with running_parts(redis_connection, GatewaySettings()) as parts:
        found = [(m, route.path) for route in routes_of(parts) for m in route.methods or ()]
    assert len(found) > 50
    return sorted(route for route in found if route[0] != "HEAD")


@pytest.fixture
def keys(redis_connection: Redis) -> dict[str, str]:
    """A key of each kind."""
    store = KeyStore(redis_connection)
    return {
        "one": store.add("one"),
        "two": store.add("two"),
        "admin": store.add("admin", is_admin=True),
        "metrics": store.add("metrics", reads_metrics=True),
    }


class Caller:
    """Sends requests over one connection, opened again where the gateway has closed it."""

    def __init__(self, gateway: Gateway, key: str = "") -> None:
        self._gateway, self._key = gateway, key
        self._connection = HTTPConnection("127.0.0.1", gateway.port, timeout=20)

    def call(
        self, method: str, path: str, body: bytes = b"", **headers: str
    ) -> tuple[HTTPResponse, bytes]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if self._key:
            named.setdefault("authorization", f"Bearer {self._key}")
        self._connection.request(method, path, body or None, named)
        answer = self._connection.getresponse()
        return answer, answer.read()

    def close(self) -> None:
        self._connection.close()

    def status(self, method: str, path: str, body: bytes = b"", **headers: str) -> int:
        """The status of the answer, which must be an error in OpenAI's shape or none at all."""
        answer, raw = self.call(method, path, body, **headers)
        if answer.status >= 400:
            assert json.loads(raw)["error"]["message"], (method, path)
            assert b"raceback" not in raw and b"/home/" not in raw, raw
        return answer.status


@pytest.fixture
def caller_of(gateway: Gateway, keys: dict[str, str]) -> Iterator[Make]:
    """Makes callers by the name of their key; "" has none."""
    with ExitStack() as stack:

        def made(name: str) -> Caller:
            caller = Caller(gateway, keys.get(name, ""))
            stack.callback(caller.close)
            return caller

        yield made


def filled(path: str, **values: str) -> str:
    """A route's path with these values for its parameters."""
    return re.sub(r"\{(\w+)(?::\w+)?\}", lambda found: values.get(found[1], "1"), path)


def raw_exchange(gateway: Gateway, text: str) -> bytes:
    """The whole answer to a request that closes its connection."""
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=10) as connection:
        connection.sendall(text.encode())
        found = b""
        while piece := connection.recv(65_536):
            found += piece
        return found


def test_no_route_serves_strangers_or_other_sites(
    gateway: Gateway, routes: list[Route], keys: dict[str, str], caller_of: Make
) -> None:
    """Without a key 401, a key for metrics 403, another host, site or form 403: on every route."""
    nobody, metrics, one = map(caller_of, ("", "metrics", "one"))
    for method, route in routes:
        path = filled(route, file_id="file-x", batch_id="batch_x", name="x")
        where = (method, path)
        is_open = route in OPEN or ASSET.fullmatch(route) is not None
        if not is_open:
            assert nobody.status(method, path) == 401, where
            assert nobody.status(method, path, authorization="Bearer bkv-x") == 401, where
            cookie = f"batchkv-session-{gateway.port}={'a' * 43}"
            own = {"cookie": cookie, "x_batchkv_request": "1"}
            assert nobody.status(method, path, **own) == 401, where
            expected = 200 if path == "/metrics" else 403
            assert metrics.status(method, path) == expected, where
        assert one.status(method, path, host="evil.example") == 403, where
        assert one.status(method, path, origin=EVIL_SITE) == 403, where
        assert one.status(method, path, sec_fetch_site="same-site") == 403, where
        if method != "GET":
            form = {"origin": f"http://127.0.0.1:{gateway.port}", "content_type": "text/plain"}
            assert nobody.status(method, path, b"a=b", **form) == 403, where
        assert one.status("GET", "/v1/models") == 200, where
    assert gateway.process.poll() is None and "Traceback" not in gateway.log.read_text()


def test_no_route_accepts_two_lengths_or_a_terabyte(
    gateway: Gateway, routes: list[Route], keys: dict[str, str], caller_of: Make
) -> None:
    """Every route that may have a body: one answer, an error, and the connection is closed."""
    one = caller_of("one")
    head = f"Host: 127.0.0.1\r\nAuthorization: Bearer {keys['one']}\r\n"
    inner = f"GET /v1/models HTTP/1.1\r\n{head}\r\n"
    for method, route in routes:
        path = filled(route, file_id="file-x", batch_id="batch_x", name="x")
        if method == "GET":
            continue
        start = f"{method} {path} HTTP/1.1\r\n{head}Content-Type: application/json\r\n"
        chunked = "Transfer-Encoding: chunked\r\n"
        for lengths, statuses in (
            (f"Content-Length: {len(inner)}\r\n{chunked}\r\n0\r\n\r\n{inner}", {400}),
            (f"Content-Length: 0\r\nContent-Length: {len(inner)}\r\n\r\n{inner}", {400}),
            (f"{chunked}\r\nx\r\n{inner}", {400, 404}),
            (f"Content-Length: {HUGE}\r\nConnection: close\r\n\r\n", {413}),
        ):
            answer = raw_exchange(gateway, start + lengths)
            assert answer.count(b"HTTP/1.1 ") == 1, (method, path, answer[:400])
            assert int(answer[9:12]) in statuses, (method, path, lengths[:40], answer[:400])
        assert one.status("GET", "/v1/models") == 200
    assert gateway.process.poll() is None and "Traceback" not in gateway.log.read_text()


def test_ids_of_another_key_are_like_ids_that_do_not_exist(
    gateway: Gateway, routes: list[Route], keys: dict[str, str], caller_of: Make
) -> None:
    """Every route with an id answers the same for both, and changes nothing."""
    one, two, admin = map(caller_of, ("one", "two", "admin"))
    form = (
        b'--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--B\r\nContent-'
        b'Disposition: form-data; name="file"; filename="a"\r\n\r\n' + chat_file("a", "b")
    ) + b"\r\n--B--\r\n"
    _, raw = two.call("POST", "/v1/files", form, content_type="multipart/form-data; boundary=B")
    file_id = json.loads(raw)["id"]
    asked = {"completion_window": "24h", "endpoint": "/v1/chat/completions"}
    text = json.dumps({**asked, "input_file_id": file_id}).encode()
    _, raw = two.call("POST", "/v1/batches", text, content_type="application/json")
    openai_id = json.loads(raw)["id"]
    _, raw = two.call("POST", "/batchkv/v1/batches", chat_file("c"))
    native_id = json.loads(raw)["submitted"]["batch_id"]
    seen = []
    for method, route in routes:
        if "{batch_id}" not in route and "{file_id}" not in route:
            continue
        for batch_id in (openai_id, native_id, native_id[:8]):
            none = "batch_" + "0" * 32 if batch_id == openai_id else "0" * len(batch_id)
            theirs = filled(route, file_id=file_id, batch_id=batch_id)
            nobodys = filled(route, file_id="file-" + "0" * 32, batch_id=none)
            answers = []
            for path, own in ((theirs, (file_id, batch_id)), (nobodys, ("file-" + "0" * 32, none))):
                answer, raw = one.call(method, path)
                shown = raw.decode()
                for each in own:
                    shown = shown.replace(each, "ID")
                answers.append((answer.status, shown))
            assert answers[0] == answers[1], (method, theirs)
            assert answers[0][0] in (400, 404), (method, theirs, answers)
            seen.append(theirs)
    assert len(seen) > 20
    for path, name in (("/v1/batches", openai_id), ("/v1/files", file_id),
                       ("/batchkv/v1/batches", native_id)):  # fmt: skip
        assert name not in one.call("GET", path)[1].decode()
        assert name in two.call("GET", path)[1].decode()
        assert two.status("GET", f"{path}/{name}") == 200
    assert native_id in admin.call("GET", "/batchkv/v1/batches")[1].decode()
    assert admin.status("GET", f"/batchkv/v1/batches/{native_id}") == 200
    assert admin.status("GET", f"/v1/files/{file_id}") == 404
    status = json.loads(two.call("GET", f"/v1/batches/{openai_id}")[1])["status"]
    assert status in ("validating", "in_progress")


def test_pages_of_a_named_site_are_answered_and_get_no_cookies(
    gateway: Gateway, routes: list[Route], keys: dict[str, str], caller_of: Make
) -> None:
    """With a key, never with a cookie; its preflight is answered on every route, others are not."""
    one, nobody = caller_of("one"), caller_of("")
    login = json.dumps({"key": keys["one"]}).encode()
    own = {"origin": f"http://127.0.0.1:{gateway.port}", "content_type": "application/json"}
    answer, _ = nobody.call("POST", "/page/login", login, **own)
    cookie = str(answer.getheader("set-cookie")).partition(";")[0]
    assert answer.status < 300 and cookie.startswith("batchkv-session")
    assert nobody.status("GET", "/v1/files", cookie=cookie) == 200
    assert nobody.status("GET", "/v1/files", cookie=cookie, origin=GOOD_SITE) == 401
    forms = {"cookie": cookie, "content_type": "text/plain"}
    assert nobody.status("DELETE", "/v1/files/file-x", **forms) == 403
    answer, _ = one.call("GET", "/v1/files", origin=GOOD_SITE, sec_fetch_site="cross-site")
    assert answer.status == 200 and answer.getheader("access-control-allow-origin") == GOOD_SITE
    answer, _ = nobody.call("GET", "/v1/files", origin=GOOD_SITE)
    assert answer.status == 401 and answer.getheader("access-control-allow-origin") == GOOD_SITE
    for method, route in routes:
        path = filled(route)
        asked = {"access_control_request_method": method}
        asked["access_control_request_headers"] = "authorization"
        answer, raw = nobody.call("OPTIONS", path, origin=GOOD_SITE, **asked)
        assert (answer.status, raw) == (204, b"")
        assert answer.getheader("access-control-allow-headers") == "authorization"
        assert answer.getheader("access-control-allow-credentials") is None
        answer, _ = nobody.call("OPTIONS", path, origin=EVIL_SITE, **asked)
        assert answer.status == 403 and not answer.getheader("access-control-allow-origin")


def test_hostile_values_are_refused_or_stay_text(gateway: Gateway, caller_of: Make) -> None:
    """Bodies and queries of all rooms: an error each, no page of HTML, and the next is served."""
    one = caller_of("one")
    body = json.loads(chat_line("a"))["body"]
    chat, native = "/v1/chat/completions", "/batchkv/v1/batches"
    none, as_json = f"{native}/{'0' * 16}", {"content_type": "application/json"}
    tries: list[tuple[str, str, bytes, dict[str, str]]] = [
        *(
            ("POST", path, raw, as_json)
            for path in (chat, "/v1/completions", "/v1/batches", "/page/login", "/page/exchange")
            for raw in (
                b"", b"{", b"null", b"[]", b"[" * 100_000, b'{"model": "' + b"x" * 10**6 + b'"',
                b'{"a": \xff}', b'{"model": NaN}', b'{"model": 1e999}', b'{"model": "\x00"}',
                b'{"model": "\\ud800"}', b'{"model": ' + b"9" * 5000 + b"}",
            )
        ),
        *(
            ("POST", chat, json.dumps({**body, **more}).encode(), as_json)
            for more in (
                {"model": MARKUP}, {"model": "../../etc/passwd"}, {"model": "*"}, {"n": 10**9},
                {"max_tokens": -1}, {"stream": "yes"}, {"messages": [{"role": MARKUP}]},
                {"cache_salt": "of another"}, {"messages": [[]]}, {"tools": "x" * 1000},
                {"model": "fake", "messages": [{"role": "user", "content": "\x00" * 1000}]},
            )
        ),
        ("POST", native, b"", {}),
        ("POST", native, b"\x1f\x8b\x00" * 100, {}),
        ("POST", native, chat_file("a"), {"x_batchkv_priority": MARKUP}),
        ("POST", native, chat_file("a"), {"x_batchkv_expires": "-1h"}),
        ("POST", native, chat_file("a"), {"x_batchkv_nothing": "x"}),
        ("POST", native, b"x" * 120_000, {}),
        ("POST", native, chat_file("a"), {"content_encoding": "gzip"}),
        ("POST", f"{none}/retry", b"[" * 1000, {}),
        *(
            ("GET", path, b"", {})
            for path in (
                f"{native}?limit=-1", f"{native}?limit=9999999999", f"{native}?after=*",
                f"{none}/results?after=-1", f"{none}/results?after=1e9", f"{none}/rows?limit=0",
                f"{none}/results?follow=2", f"{none}/rows?outcome={MARKUP.replace('<', '%3C')}",
                f"{none}/jobs/99999999999999999999", f"{none}/jobs/-1", f"{native}/%00",
                f"{native}/..%2f..%2fx", f"{native}/*", "/batchkv/v1/samples?queue=*",
                "/page/../etc/passwd", "/page/%2e%2e/x.js", "/page/views/..%2f..%2fapp.js",
                "/page/facts/*", f"/v1/models/{'x' * 5000}", "/v1/models/%3Cscript%3E",
            )
        ),
    ]  # fmt: skip
    served = []
    for method, path, raw, headers in tries:
        answer, found = one.call(method, path, raw, **headers)
        where = (method, path, raw[:40], headers, answer.status, found[:200])
        kind = str(answer.getheader("content-type"))
        assert kind == "application/json", where
        assert answer.getheader("x-content-type-options") == "nosniff", where
        assert answer.status < 500 or answer.status == 503, where
        if answer.status < 400:
            served.append((path, found))
        assert one.status("GET", "/v1/models") == 200, where
    allowed = ("/batchkv/v1/samples?queue=*",)  # an empty list
    assert [path for path, _ in served if path not in allowed] == [], served
    assert gateway.process.poll() is None and "Traceback" not in gateway.log.read_text()


def test_names_with_markup_stay_text(gateway: Gateway, caller_of: Make) -> None:
    """A name is stored as it is, and sent as JSON; the page may run no script but its own."""
    one = caller_of("one")
    name = f"{MARKUP}\u202e{uuid.uuid4()}"
    headers = {"x_batchkv_name": name.encode("ascii", "backslashreplace").decode()}
    answer, raw = one.call("POST", "/batchkv/v1/batches", chat_file("a"), **headers)
    assert answer.status < 300, raw
    answer, raw = one.call("GET", "/batchkv/v1/batches")
    assert answer.getheader("content-type") == "application/json" and b"script" in raw
    answer, raw = caller_of("").call("GET", "/")
    policy = str(answer.getheader("content-security-policy"))
    assert "default-src 'none'" in policy and "script-src 'self'" in policy
    assert "unsafe" not in policy and b"alert" not in raw
    assert answer.getheader("x-content-type-options") == "nosniff"
