"""The address of a gateway, its key, and the authority of its certificate."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from batchkv_producer.errors import UsageError
from batchkv_producer.server.connection import masked

KEY_VARIABLE = "BATCHKV_API_KEY"
CA_VARIABLE = "BATCHKV_CA_FILE"
PREFIX = "/batchkv/v1"
OPENAI_PREFIX = "/v1"  # the end of a base URL for OpenAI's clients
MAX_KEY_CHARS = 256
_OWN = ("localhost", "127.0.0.1", "::1")  # no proxy leads there
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Address:
    """Where a gateway is. ``root`` is the path before ``PREFIX``; "" for most.

    ``proxy`` is (host, port) of an HTTP proxy. ``ca_file``: who signed the certificate; "" are the
    system's authorities.
    """

    scheme: str
    host: str
    port: int
    root: str = ""
    key: str = ""
    ca_file: str = ""
    proxy: tuple[str, int] | None = None

    @property
    def url(self) -> str:
        """The URL, for people and for the Host header of a proxy."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == _PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}{self.root}"

    def tls(self) -> ssl.SSLContext | None:
        """The settings of TLS; None without it. Raises UsageError for an unusable authority."""
        if self.scheme == "http":
            return None
        try:
            return ssl.create_default_context(cafile=self.ca_file or None)
        except ssl.SSLError as fault:
            message = f"{CA_VARIABLE} names {self.ca_file}, which has no certificate (PEM)"
            raise UsageError(message) from fault
        except OSError as fault:
            raise UsageError(f"{CA_VARIABLE} names {self.ca_file}: {fault.strerror}") from fault


def address_of(url: str, environ: Mapping[str, str] = os.environ) -> Address:
    """The address of a URL, with the key and the authority of the environment. UsageError."""
    shown = masked(url)
    try:
        parts = urlsplit(url.strip())
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host:
        raise UsageError(f"the gateway's URL {shown} cannot be read: it must be http://HOST:PORT")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise UsageError(
            f"the gateway's URL {shown} must be http://HOST:PORT alone. Put the key into "
            f"{KEY_VARIABLE}: other users can see command lines"
        )
    scheme = parts.scheme.lower()
    root = parts.path.rstrip("/").removesuffix(PREFIX).removesuffix(OPENAI_PREFIX).rstrip("/")
    if not root.isascii() or not root.isprintable() or " " in root:
        raise UsageError(f"the gateway's URL {shown} has a path that cannot be one")
    ca_file = environ.get(CA_VARIABLE, "").strip()
    return Address(
        scheme=scheme,
        host=host,
        port=port or _PORTS[scheme],
        root=root,
        key=_key(environ),
        ca_file=str(Path(ca_file).expanduser()) if ca_file else "",
        proxy=_proxy(scheme, host),
    )


def _key(environ: Mapping[str, str]) -> str:
    key = environ.get(KEY_VARIABLE, "").strip()
    if not key.isascii() or not key.isprintable() or " " in key or len(key) > MAX_KEY_CHARS:
        raise UsageError(f"{KEY_VARIABLE} is no key: `batchkv keys add NAME` makes one")
    return key


def _proxy(scheme: str, host: str) -> tuple[str, int] | None:
    """The proxy of the system, or of ``http_proxy``, ``https_proxy`` and ``no_proxy``."""
    named = getproxies().get(scheme, "")
    if not named or host in _OWN or proxy_bypass(host):
        return None
    try:
        parts = urlsplit(named if "://" in named else f"http://{named}")
        if parts.scheme != "http" or not parts.hostname or "@" in parts.netloc:
            raise ValueError
        return parts.hostname, parts.port or _PORTS["http"]
    except ValueError:
        raise UsageError(
            f"{scheme}_proxy is {masked(named)}: it must be http://HOST:PORT without a password. "
            f"no_proxy={host} goes without a proxy"
        ) from None
