"""Which pages of a browser may call the gateway."""

from __future__ import annotations

import pytest

from batchkv_gateway.errors import ApiError
from batchkv_gateway.http.sites import Sender, checked_origins, preflight_headers, sender_of
from batchkv_producer.errors import UsageError

HOST = "127.0.0.1:8080"
OWN, GOOD, BAD = f"http://{HOST}", "https://good.example", "https://bad.example"
ALLOWED = frozenset({GOOD})


def sender(method: str = "GET", path: str = "/v1/files", **headers: str) -> Sender | str:
    """The sender of a request, or the code with which it is refused."""
    values = {name.replace("_", "-").encode(): [value.encode()] for name, value in headers.items()}
    try:
        return sender_of(method, path, values, HOST, ALLOWED)
    except ApiError as fault:
        return str(fault.code)


def test_origins_are_written_as_browsers_write_them() -> None:
    """One with a path, a user, a default port or a star is refused, and so is a bare name."""
    right = ("https://App.example", "http://localhost:3000", "http://[::1]:81", "http://10.0.0.1")
    assert checked_origins(right) == {each.lower() for each in right}
    for wrong in ("*", "https://*.example", "null", "app.example", "https://a.example/",
                  "https://a.example/x", "https://u@a.example", "https://a.example:443",
                  "http://a.example:80", "ftp://a.example", "https://", "https://a:x", "http://a b",
                  "https://\u00e9.example", "https://a?x"):  # fmt: skip
        with pytest.raises(UsageError, match="--cors"):
            checked_origins([wrong])


def test_only_allowed_sites_call_the_gateway() -> None:
    """Programs and the own page are served, pages of --cors are named; all others are refused."""
    assert sender() == sender("DELETE") == Sender()
    assert sender(origin=OWN, sec_fetch_site="same-origin") == Sender()
    assert sender(origin=GOOD, sec_fetch_site="cross-site") == Sender(GOOD)
    for name in (BAD, "null", f"{GOOD}.evil.example", f"{GOOD}:444", "http://good.example"):
        assert sender(origin=name) == sender("POST", origin=name, authorization="x") == "origin"
    for site in ("cross-site", "same-site"):
        assert sender(sec_fetch_site=site) == "origin"
    two = {b"origin": [GOOD.encode(), BAD.encode()]}
    with pytest.raises(ApiError):
        sender_of("GET", "/", two, HOST, ALLOWED)


def test_a_link_leads_to_the_page_alone() -> None:
    """Other paths, frames, scripts and forms of another site stay refused."""
    link = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}
    assert sender(path="/", sec_fetch_dest="document", **link) == Sender()
    assert sender(path="/v1/files", **link) == "origin"
    assert sender(path="/", sec_fetch_dest="iframe", **link) == "origin"
    assert sender(path="/", sec_fetch_site="cross-site", sec_fetch_mode="no-cors") == "origin"
    assert sender("POST", "/", **link) == "origin"


def test_a_change_by_a_browser_needs_more_than_a_form_sends() -> None:
    """A key, a JSON body or the header of the own page. Programs need none of it."""
    form = {"content_type": "multipart/form-data; boundary=x"}
    for browser in ({"origin": OWN}, {"sec_fetch_site": "same-origin"}, {"cookie": "a=b"}):
        for method in ("POST", "DELETE", "PUT"):
            assert sender(method, **browser) == sender(method, **browser, **form) == "csrf"
            assert sender(method, **browser, x_batchkv_request="2") == "csrf"
        for more in ({"authorization": "Bearer x"}, {"x_batchkv_request": "1"},
                     {"content_type": "application/json; charset=utf-8"}):  # fmt: skip
            assert sender("POST", **browser, **more) == Sender()
        assert sender("GET", **browser) == Sender()
    assert sender("POST", **form) == Sender()
    assert sender("POST", origin=GOOD, **form) == "csrf"


def test_a_preflight_names_what_was_asked_and_no_cookies() -> None:
    """Names of headers are repeated if they are names. Nothing allows credentials or any site."""
    asked = {"access_control_request_method": "POST"}
    found = sender("OPTIONS", origin=GOOD, **asked)
    assert found == Sender(GOOD, is_preflight=True)
    assert sender("OPTIONS", origin=BAD, **asked) == "origin"
    assert sender("OPTIONS", origin=GOOD) == Sender(GOOD)
    names = b"authorization, x-stainless-os"
    headers = dict(preflight_headers({b"access-control-request-headers": [names]}))
    assert headers[b"access-control-allow-headers"] == names
    bad = {b"access-control-request-headers": [b"a\r\nset-cookie: x=y"]}
    assert b"access-control-allow-headers" not in dict(preflight_headers(bad))
    own = dict(found.headers()) if isinstance(found, Sender) else {}
    assert own[b"access-control-allow-origin"] == GOOD.encode() and own[b"vary"] == b"Origin"
    assert b"access-control-allow-credentials" not in {**headers, **own}
    assert Sender().headers() == []
