"""Which pages of a browser may call the gateway: its own, and those of ``--cors``.

A browser sends ``Origin`` or ``Sec-Fetch-Site`` with what a page does. Programs send neither.

- A page of another site is refused (403), unless its origin is one of ``--cors``. Then the answers
  say so to the browser. They never allow it to send cookies.
- A link from another site to the page at ``/`` is followed.
- A changing request of a browser must have something that no form of another site can send: a key,
  a JSON body, or ``x-batchkv-request``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from batchkv_gateway.errors import FORBIDDEN, ApiError
from batchkv_producer.errors import UsageError

OWN_HEADER = b"x-batchkv-request"
PAGE = "/"
METHODS = "GET, POST, DELETE"
EXPOSED = "retry-after, x-request-id"
MAX_AGE_SECONDS = 600
MAX_ORIGIN_CHARS = 300
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_BROWSER = (b"origin", b"sec-fetch-site", b"cookie")
_ORIGIN = re.compile(
    r"(?P<scheme>https?)://(\[[0-9a-f:.]+\]|[a-z0-9_-]+(\.[a-z0-9_-]+)*)(:(?P<port>[1-9][0-9]{0,4}))?"
)
_DEFAULT_PORTS = {"http": "80", "https": "443"}  # browsers leave them out
_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]*")

Values = Mapping[bytes, list[bytes]]
Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Sender:
    """Where a request comes from. ``origin``: of an allowed page of another site; else empty."""

    origin: str = ""
    is_preflight: bool = False

    def headers(self) -> Headers:
        """The headers that every answer to it has."""
        if not self.origin:
            return []
        return [
            (b"access-control-allow-origin", self.origin.encode("latin-1")),
            (b"access-control-expose-headers", EXPOSED.encode()),
            (b"vary", b"Origin"),
        ]


def checked_origins(texts: Iterable[str]) -> frozenset[str]:
    """Origins as browsers write them. UsageError for anything else, and for ``*``."""
    return frozenset(map(_checked, texts))


def sender_of(method: str, path: str, values: Values, host: str, allowed: frozenset[str]) -> Sender:
    """Where a request comes from, by its headers. Raises ApiError (403) if it is refused."""
    origins = [value.decode("latin-1") for value in values.get(b"origin", [])]
    sites = values.get(b"sec-fetch-site", [])
    if len(origins) == 1 and origins[0] in allowed:
        is_preflight = method == "OPTIONS" and b"access-control-request-method" in values
        sender = Sender(origins[0], is_preflight)
    else:
        is_own = all(origin in (f"http://{host}", f"https://{host}") for origin in origins)
        is_here = all(site in (b"same-origin", b"none") for site in sites)
        if not is_own or not (is_here or _is_link(method, path, values)):
            raise ApiError(
                FORBIDDEN,
                "pages of other sites may not call this gateway, but for those of --cors ORIGIN",
                code="origin",
            )
        sender = Sender()
    if method not in _SAFE_METHODS and any(name in values for name in _BROWSER):
        _refuse_forms(values)
    return sender


def preflight_headers(values: Values) -> Headers:
    """The answer to a browser that asks before it sends a page's request."""
    asked = b", ".join(values.get(b"access-control-request-headers", []))
    found = [
        (b"access-control-allow-methods", METHODS.encode()),
        (b"access-control-max-age", str(MAX_AGE_SECONDS).encode()),
    ]
    if asked and _NAMES.fullmatch(asked):
        found.append((b"access-control-allow-headers", asked))
    return found


def _is_link(method: str, path: str, values: Values) -> bool:
    """Whether somebody follows a link to the gateway's page. Its cookie does not come along."""
    is_navigation = values.get(b"sec-fetch-mode") == [b"navigate"]
    is_whole = values.get(b"sec-fetch-dest", [b"document"]) == [b"document"]
    return method == "GET" and path == PAGE and is_navigation and is_whole


def _refuse_forms(values: Values) -> None:
    """Raise ApiError for a changing request that a form of any page could send."""
    kinds = [value.partition(b";")[0].strip().lower() for value in values.get(b"content-type", [])]
    if b"authorization" in values or values.get(OWN_HEADER) == [b"1"]:
        return
    if kinds != [b"application/json"]:
        raise ApiError(
            FORBIDDEN,
            f"a browser's request that changes something needs the header {OWN_HEADER.decode()}: 1",
            code="csrf",
        )


def _checked(text: str) -> str:
    origin = text.strip().lower()
    parts = _ORIGIN.fullmatch(origin) if len(origin) <= MAX_ORIGIN_CHARS else None
    if parts is None or parts["port"] == _DEFAULT_PORTS[parts["scheme"]]:
        raise UsageError(
            f"--cors {text[:80]}: give an origin as browsers write it, without a path, like "
            "https://app.example or http://localhost:3000; * is not allowed"
        )
    return origin
