"""The URLs that are called. They come from the operator alone, never from a request."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from batchkv_gateway.settings import is_loopback
from batchkv_producer.errors import UsageError

MAX_URL_CHARS = 2000
_NAME_DIGITS = 16
_PRINTABLE = re.compile(r"[!-~]+")


@dataclass(frozen=True, slots=True)
class Target:
    """One URL. ``path`` may be a secret, so that Redis and logs have ``name`` and ``shown``."""

    name: str
    shown: str
    host: str
    port: int
    path: str = field(repr=False)
    is_tls: bool


def checked_targets(urls: Iterable[str]) -> tuple[Target, ...]:
    """The targets of these URLs, each once. UsageError for one that may not be called."""
    return tuple(dict.fromkeys(map(_checked, urls)))


def _checked(url: str) -> Target:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise _wrong("it cannot be read") from None
    if not _PRINTABLE.fullmatch(url) or len(url) > MAX_URL_CHARS:
        raise _wrong(f"it must be at most {MAX_URL_CHARS} ASCII characters without blanks")
    if parts.scheme not in ("http", "https") or not host:
        raise _wrong("it must begin with https:// and a host")
    if parts.scheme == "http" and not is_loopback(host):
        raise _wrong(f"http is for this machine alone, and {host} is another: use https")
    if "@" in parts.netloc or parts.fragment:
        raise _wrong("it must have no user, no password and no fragment")
    path = parts.path or "/"
    is_tls = parts.scheme == "https"
    return Target(
        name=hashlib.sha256(url.encode()).hexdigest()[:_NAME_DIGITS],
        shown=f"{parts.scheme}://{parts.netloc}",
        host=host,
        port=port or (443 if is_tls else 80),
        path=f"{path}?{parts.query}" if parts.query else path,
        is_tls=is_tls,
    )


def _wrong(why: str) -> UsageError:
    return UsageError(f"--webhook: {why}")
