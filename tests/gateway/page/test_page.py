"""The page's files, its sessions and its events, over one gateway."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from httpx2 import Client as HttpClient
from httpx2 import Response
from redis import Redis

from batchkv_gateway import redis_keys
from batchkv_gateway.keys.sessions import Sessions
from batchkv_gateway.keys.store import KeyStore
from batchkv_gateway.page.assets import POLICY
from support.gateway import Gateway, chat_file

OWN = {"x-batchkv-request": "1"}
ASSETS = Path(__file__).parents[3] / "gateway/batchkv_gateway/page/assets"


@pytest.fixture
def viewer(gateway: Gateway, redis_connection: Redis) -> Iterator[HttpClient]:
    """A browser, as far as cookies go, on an empty server."""
    with HttpClient(base_url=gateway.url.removesuffix("/v1"), timeout=20) as found:
        yield found


@pytest.fixture
def keys(redis_connection: Redis) -> KeyStore:
    """The keys of the gateway."""
    return KeyStore(redis_connection)


def sign_in(viewer: HttpClient, key: str) -> Response:
    return viewer.post("/page/login", json={"key": key}, headers=OWN)


def new_batch(viewer: HttpClient, headers: dict[str, str], *rows: str) -> str:
    """The id of a batch of OpenAI's API."""
    upload = {"file": ("a.jsonl", chat_file(*rows))}
    file = viewer.post("/v1/files", files=upload, data={"purpose": "batch"}, headers=headers)
    asked = {"input_file_id": file.json()["id"], "endpoint": "/v1/chat/completions"}
    asked["completion_window"] = "24h"
    made = viewer.post("/v1/batches", json=asked, headers=headers)
    assert made.status_code == 200, made.text
    return str(made.json()["id"])


@contextmanager
def events(viewer: HttpClient) -> Iterator[Iterator[tuple[str, Any]]]:
    """(name, data) of the events, as they come."""

    def read(lines: Iterator[str]) -> Iterator[tuple[str, Any]]:
        name = ""
        for line in lines:
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                yield name, json.loads(line.removeprefix("data: "))

    with viewer.stream("GET", "/page/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield read(answer.iter_lines())


def first_batches(viewer: HttpClient) -> list[str]:
    """The ids that the first event names."""
    with events(viewer) as found:
        return next(list(data["order"]) for name, data in found if name == "batches")


def test_files_of_the_page_are_strict_and_kept_by_their_tags(viewer: HttpClient) -> None:
    """Nothing from elsewhere may load, nothing in the document runs, and a known file is 304."""
    page = viewer.get("/")
    assert page.headers["content-security-policy"] == POLICY
    assert "unsafe" not in POLICY and "default-src 'none'" in POLICY
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["cache-control"] == "no-cache"
    assert "<style" not in page.text and "<script>" not in page.text and " on" not in page.text
    for file in ASSETS.rglob("*.*"):
        name = file.relative_to(ASSETS).as_posix()
        if name == "index.html":
            continue
        found = viewer.get(f"/page/{name}")
        assert found.content == file.read_bytes()
        again = viewer.get(f"/page/{name}", headers={"if-none-match": found.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    assert viewer.get("/page/../settings.py").status_code == 404
    assert viewer.get("/page/views/%2e%2e/index.html").status_code == 404


def test_no_script_of_the_page_makes_markup_of_text() -> None:
    """No file uses what parses markup or runs text, and none names another host."""
    for file in ASSETS.rglob("*.js"):
        text = file.read_text()
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert word not in text, (file.name, word)
        assert "http:" not in text.replace("http://www.w3.org/2000/svg", ""), file.name
        assert "https:" not in text, file.name


def test_a_key_becomes_a_cookie_that_scripts_cannot_read(
    viewer: HttpClient, keys: KeyStore, redis_connection: Redis
) -> None:
    """The session has the key's rights until it is ended; Redis has digests alone."""
    key = keys.add("laptop")
    assert viewer.get("/page/session").json()["is_signed_in"] is False
    assert viewer.get("/page/events").status_code == 401
    assert sign_in(viewer, f"bkv-{'0' * 8}-{'0' * 32}").status_code == 401
    assert sign_in(viewer, keys.add("monitor", reads_metrics=True)).status_code == 403
    answer = sign_in(viewer, key)
    words = answer.headers["set-cookie"].lower()
    assert answer.status_code == 200
    assert "httponly" in words and "samesite=strict" in words and "secure" not in words
    whose = viewer.get("/page/session").json()
    assert (whose["name"], whose["sees_all"], whose["has_session"]) == ("laptop", False, True)
    assert viewer.get("/v1/files").status_code == 200
    cookie = next(iter(viewer.cookies.values()))
    assert all(cookie.encode() not in name for name in redis_connection.keys("*"))
    assert viewer.post("/page/logout", json={}, headers=OWN).status_code == 200
    viewer.cookies.set(words.partition("=")[0], cookie)  # a thief's copy is of no use either
    assert viewer.get("/v1/files").status_code == 401


def test_behind_tls_the_cookie_is_secure(viewer: HttpClient, keys: KeyStore) -> None:
    """The browser says that it sees TLS, also where a proxy has it."""
    key = keys.add("laptop")
    host = f"{viewer.base_url.host}:{viewer.base_url.port}"
    origin = {"origin": f"https://{host}", **OWN}
    answer = viewer.post("/page/login", json={"key": key}, headers=origin)
    assert "secure" in answer.headers["set-cookie"].lower()


def test_a_removed_key_ends_its_sessions(viewer: HttpClient, keys: KeyStore) -> None:
    """The cookie is worth nothing from then on."""
    assert sign_in(viewer, keys.add("laptop")).status_code == 200
    keys.add("other")
    keys.remove("laptop")
    assert viewer.get("/v1/files").status_code == 401
    assert viewer.get("/page/session").json()["is_signed_in"] is False


def test_a_cookie_alone_changes_nothing(viewer: HttpClient, keys: KeyStore) -> None:
    """A change needs the header that pages of other sites cannot send."""
    sign_in(viewer, keys.add("laptop"))
    upload = {"files": {"file": ("a.jsonl", chat_file("a"))}, "data": {"purpose": "batch"}}
    refused = viewer.post("/v1/files", **upload)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "csrf")
    refused = viewer.post("/page/logout", json={})  # also in a form that forms cannot send
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "csrf")
    assert viewer.post("/v1/files", **upload, headers=OWN).status_code == 200
    stranger = {"origin": "https://elsewhere.example"}
    assert viewer.get("/v1/files", headers=stranger).status_code in (401, 403)


def test_a_ticket_opens_one_session(
    viewer: HttpClient, keys: KeyStore, redis_connection: Redis
) -> None:
    """It is the operator's, who sees all batches; the second use and a wrong ticket are refused."""
    keys.add("laptop")
    sessions = Sessions(redis_connection, keys)
    ticket = sessions.make_ticket()
    assert 0 < redis_connection.ttl(next(iter(redis_connection.keys(redis_keys.ticket("*"))))) <= 60

    def exchange(text: str) -> int:
        return viewer.post("/page/exchange", json={"ticket": text}, headers=OWN).status_code

    assert [exchange("x"), exchange(ticket), exchange(ticket)] == [401, 200, 401]
    whose = viewer.get("/page/session").json()
    assert whose["sees_all"] and whose["has_session"]


def test_events_tell_what_changes(viewer: HttpClient, redis_connection: Redis) -> None:
    """The first events have everything, and later ones the batches that changed."""
    with events(viewer) as found:
        names = [next(found) for _ in range(3)]
        assert [name for name, _ in names] == ["history", "batches", "workers"]
        assert names[1][1] == {"order": [], "trouble": "", "changed": []}
        made = new_batch(viewer, OWN, "a", "b")
        name, data = next(found)
        assert (name, data["order"]) == ("batches", [made])
        while not data["changed"] or data["changed"][0]["total"] != 2:  # it is checked first
            name, data = next(found)
        assert name == "batches" and data["changed"][0]["openai_id"] == made


def test_a_viewer_sees_batches_of_the_own_key(viewer: HttpClient, keys: KeyStore) -> None:
    """Another key's batch is in nobody else's events, and an admin sees both."""
    ids = {}
    people = {name: keys.add(name, is_admin=name == "admin") for name in ("a", "b", "admin")}
    for name in ("a", "b"):
        bearer = {"authorization": f"Bearer {people[name]}"}
        ids[name] = new_batch(viewer, bearer, name)
    shown = {}
    for name, key in people.items():
        sign_in(viewer, key)
        shown[name] = set(first_batches(viewer))
        viewer.cookies.clear()
    assert shown == {"a": {ids["a"]}, "b": {ids["b"]}, "admin": set(ids.values())}
