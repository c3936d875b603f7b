"""The settings of a gateway, read once from flags and variables (``GATEWAY_TABLE``)."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from batchkv_gateway.secret import VARIABLE as SECRET
from batchkv_gateway.secret import read_secret
from batchkv_producer.errors import UsageError
from batchkv_producer.settings_table import GATEWAY_BY_NAME, Setting, ValueType
from batchkv_producer.wire.batch_options import seconds_of

DAY = 86_400
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SIZE = re.compile(r"([0-9]{1,12})\s*([KMG]I?B)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """One gateway's settings. ``allow_hosts`` are more names by which clients may call it."""

    host: str = "127.0.0.1"
    port: int = 8080
    max_file_bytes: int = 200 * 10**6
    max_rows: int = 50_000
    keep_files_seconds: int = 30 * DAY
    allow_hosts: tuple[str, ...] = ()
    tls_cert: str = ""
    tls_key: str = ""
    is_plain: bool = False
    key_rows: int = 0  # the limits of keys that have none of their own; 0: none
    key_bytes: int = 0
    is_private: bool = False
    cors: tuple[str, ...] = ()  # origins of pages that may call the gateway
    webhooks: tuple[str, ...] = field(default=(), repr=False)  # a URL may have a secret in its path
    webhook_secret: bytes = field(default=b"", repr=False)

    @classmethod
    def read(
        cls, flags: Mapping[str, str | None], environ: Mapping[str, str] = os.environ
    ) -> GatewaySettings:
        """The settings of these flags, else of the variables. UsageError names a wrong one."""
        texts = {}
        for name, setting in GATEWAY_BY_NAME.items():
            flag = flags.get(name)
            given = environ.get(setting.variable, "").strip() if flag is None else flag
            texts[name] = (given or setting.default, setting.flag if flag else setting.variable)
        values = {name: GATEWAY_BY_NAME[name] for name in texts}
        sizes = {name: _checked(values[name], *texts[name]) for name in texts if name in _NUMBERS}
        found = cls(
            host=texts["host"][0],
            port=sizes["port"],
            max_file_bytes=sizes["max_file_bytes"],
            max_rows=sizes["max_rows"],
            keep_files_seconds=sizes["keep_files_seconds"],
            allow_hosts=_listed(texts["allow_hosts"][0]),
            tls_cert=texts["tls_cert"][0],
            tls_key=texts["tls_key"][0],
            is_plain=texts["is_plain"][0] == "on",
            key_rows=sizes["key_rows"],
            key_bytes=sizes["key_bytes"],
            is_private=texts["is_private"][0] == "on",
            cors=_listed(texts["cors"][0]),
            webhooks=_listed(texts["webhooks"][0]),
            webhook_secret=read_secret(environ),
        )
        if bool(found.tls_cert) != bool(found.tls_key):
            raise UsageError("--tls-cert and --tls-key belong together: give both or neither")
        if found.webhooks and not found.webhook_secret:
            raise UsageError(
                f"--webhook needs a secret that signs its events: set {SECRET} to whsec_ and "
                "random bytes in base64 (openssl rand -base64 32)"
            )
        return found


def _listed(text: str) -> tuple[str, ...]:
    """The parts between commas."""
    return tuple(filter(None, (each.strip() for each in text.split(","))))


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


_NUMBERS = frozenset(
    {"port", "max_file_bytes", "max_rows", "keep_files_seconds", "key_rows", "key_bytes"}
)


def size_of(text: str) -> int:
    """The bytes of a size like ``200MB`` or ``2GiB``. Raises ValueError."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text[:80]!r} is not a size like 200MB or 2GiB")
    return int(found[1]) * _UNITS[(found[2] or "").upper()]


def _checked(setting: Setting, text: str, name: str) -> int:
    """The number of a setting's text. ``name`` is the flag or variable that gave it."""
    value = -1
    if setting.value_type is ValueType.WHOLE:
        value = int(text) if text.isascii() and text.isdecimal() and len(text) < 12 else -1
    else:
        with suppress(ValueError):
            value = size_of(text) if setting.value_type is ValueType.SIZE else seconds_of(text)
    if not setting.low <= value <= setting.high:
        raise UsageError(f"{name} must be {setting.allowed() or setting.about}; got {text[:80]!r}")
    return value
