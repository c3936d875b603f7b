"""Parses the text that names the tiers, from fast to slow.

::

    memory:?max=2GB disk:~/.batchkv/blocks?max=50GB&fsync=none
    redis://:PASSWORD@hub:6380/0?max=4GB s3://bucket/prefix?max=200GB&endpoint=http://hub:9000

=======  ===============================================  ========================================
memory   ``memory:``                                      ``max`` [2GB]
disk     ``disk:/absolute/path``, ``disk:~/path``         ``max`` [20GB],
                                                          ``fsync`` [none], ``file`` or ``full``
redis    ``redis://[[USER]:PASSWORD@]HOST[:PORT][/DB]``,  ``max`` [the server's maxmemory]
         ``rediss://`` with TLS,                          and ``ssl_ca_certs``, a file
         ``unix://[[USER]:PASSWORD@]/socket``             and ``db`` [0]
objects  ``s3://BUCKET[/PREFIX]``                         ``max`` [100GB], ``region``,
                                                          ``endpoint`` [Amazon's]
=======  ===============================================  ========================================

Defaults are in square brackets at the right. Blanks separate tiers. A blank in a tier is written
``%20``; special characters of a password are written in the same way. There is at most one tier of
a kind, and memory comes first.

Every fault is a ValueError of one sentence. No sentence repeats a possible password. In a text that
cannot be parsed, any part may be a password.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from urllib.parse import SplitResult, quote, unquote, urlsplit

from batchkv_cache_store.sizes import parse_size
from batchkv_cache_store.tiers.disk import Durability
from batchkv_cache_store.tiers.spec_types import (
    DISK_BYTES,
    MEMORY_BYTES,
    OBJECTS_BYTES,
    OBJECTS_PREFIX,
    DiskSpec,
    MemorySpec,
    ObjectsSpec,
    RedisSpec,
    TierSpec,
)

_Size = TypeVar("_Size", int, None)

_EXAMPLE = "write for example memory:?max=2GB disk:/var/cache/batchkv?max=50GB"
_KINDS = "memory:, disk:, redis://, rediss://, unix:// or s3://"
_PASSWORD = (
    "write :PASSWORD@HOST or USER:PASSWORD@HOST, each special character of the password as % and "
    "two hex digits"
)
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*(?=:)")
_PARAMETER = re.compile(r"[a-z_]{1,20}")
_DATABASE = re.compile(r"[0-9]{1,9}")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_REGION = re.compile(r"[a-z0-9-]{1,64}")


def parse_tiers(text: str) -> tuple[TierSpec, ...]:
    """The tiers of a text, in its order; at least one. Raises ValueError with one sentence."""
    specs: list[TierSpec] = []
    for item in text.split():
        spec = _parse(item)
        if spec.kind in (other.kind for other in specs):
            raise ValueError(f"the cache has two {spec.kind} tiers: keep one")
        if spec.kind == "memory" and specs:
            raise ValueError("the cache's tiers go from fast to slow: put memory: first")
        specs.append(spec)
    if not specs:
        raise ValueError(f"the cache has no tier: {_EXAMPLE}")
    return tuple(specs)


def _parse(item: str) -> TierSpec:
    if not item.isprintable():
        raise ValueError("a tier of the cache has a character that cannot be printed")
    found = _SCHEME.match(item)
    if found is None or found[0] not in _PARSERS:
        # An item without a scheme may be the end of a password with a blank in it.
        shown = f", not with {found[0]}:" if found and "@" not in item else ""
        raise ValueError(f"a tier of the cache begins with {_KINDS}{shown}")
    address, _, query = item.partition("?")
    return _PARSERS[found[0]](address, query)


def _memory(address: str, query: str) -> MemorySpec:
    if address != "memory:":
        raise ValueError("the cache's memory: has no address: write memory:?max=2GB")
    values = _parameters("memory:", query, "max")
    return MemorySpec(_size("memory:", values, MEMORY_BYTES))


def _disk(address: str, query: str) -> DiskSpec:
    text = unquote(address.removeprefix("disk:"))
    if not text:
        raise ValueError("the cache's disk: names no folder: write disk:/absolute/path")
    if not text.isprintable():
        raise ValueError("the cache's disk: names a folder that cannot be printed")
    if text.startswith("//") and not text.startswith("///"):
        raise ValueError(f"the cache's disk:{text} names a host: write disk:/absolute/path")
    try:
        path = Path(text).expanduser()
    except RuntimeError:
        raise ValueError(f"the cache's disk:{text} names a user whose home is not known") from None
    if not path.is_absolute():
        raise ValueError(f"the cache's disk:{text} is not absolute: write disk:/absolute/path")
    values = _parameters("disk:", query, "max", "fsync")
    durability = values.get("fsync", Durability.NONE)
    if durability not in set(Durability):
        raise ValueError(f"the cache's disk: has fsync={durability}: it is none, file or full")
    return DiskSpec(path, _size("disk:", values, DISK_BYTES), Durability(durability))


def _redis(address: str, query: str) -> RedisSpec:
    scheme = address.partition(":")[0]
    kind = f"{scheme}://"
    split = _split(kind, address)
    if "@" in split.path + query or "#" in address or split.netloc.count("@") > 1:
        raise ValueError(f"the cache's {kind} has a password that ends too early: {_PASSWORD}")
    if "@" in split.netloc and not split.password:
        raise ValueError(f"the cache's {kind} has a user or an @ without a password: {_PASSWORD}")
    if scheme == "unix":
        return _unix_socket(split, query)
    if not split.hostname or not _is_port(split):
        raise ValueError(
            f"the cache's {kind} has no host, or an invalid port: write {kind}HOST:PORT/DB; "
            f"for a password {_PASSWORD}"
        )
    database = split.path.strip("/") or "0"
    if not _DATABASE.fullmatch(database) or split.path.count("/") > 1:
        raise ValueError(f"the cache's {kind} has a database that is no number: write {kind}HOST/0")
    allowed = ("max", "ssl_ca_certs") if scheme == "rediss" else ("max",)
    values = _parameters(kind, query, *allowed)
    host = f"[{split.hostname}]" if ":" in split.hostname else split.hostname
    place = f"{kind}{host}{f':{split.port}' if split.port else ''}/{database}"
    certificates = values.get("ssl_ca_certs")
    if certificates is not None and not Path(certificates).is_absolute():
        raise ValueError(f"the cache's {kind} has ssl_ca_certs that is no absolute path")
    url = address + (f"?ssl_ca_certs={quote(certificates)}" if certificates else "")
    return RedisSpec(url, place, _size(kind, values, None))


def _unix_socket(split: SplitResult, query: str) -> RedisSpec:
    if not split.path or split.netloc.rpartition("@")[2]:
        raise ValueError("the cache's unix:// names no socket: write unix:///absolute/path")
    values = _parameters("unix://", query, "max", "db")
    database = values.get("db", "0")
    if not _DATABASE.fullmatch(database):
        raise ValueError("the cache's unix:// has a db that is no number")
    url = f"unix://{split.netloc}{split.path}?db={database}"
    return RedisSpec(url, f"unix://{split.path}?db={database}", _size("unix://", values, None))


def _objects(address: str, query: str) -> ObjectsSpec:
    if "@" in address:
        raise ValueError(
            "the cache's s3:// takes no keys: put them where AWS tools look for them, "
            "AWS_ACCESS_KEY_ID or ~/.aws/credentials"
        )
    bucket, _, prefix = unquote(address.removeprefix("s3://")).partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise ValueError("the cache's s3:// names no bucket: write s3://BUCKET/PREFIX")
    if not prefix.isprintable() or len(prefix) > 512:
        raise ValueError("the cache's s3:// has a prefix that is too long or cannot be printed")
    values = _parameters("s3://", query, "max", "endpoint", "region")
    region = values.get("region")
    if region is not None and not _REGION.fullmatch(region):
        raise ValueError("the cache's s3:// has an invalid region: write region=us-east-1")
    return ObjectsSpec(
        bucket,
        f"{prefix.strip('/')}/" if prefix.strip("/") else OBJECTS_PREFIX,
        _size("s3://", values, OBJECTS_BYTES),
        _endpoint(values.get("endpoint")),
        region,
    )


def _endpoint(text: str | None) -> str | None:
    if text is None:
        return None
    split = _split("s3://", text)
    is_plain = not (split.query or split.fragment or "@" in text or split.path.strip("/"))
    if split.scheme not in ("http", "https") or not split.hostname or not is_plain:
        raise ValueError("the cache's s3:// has an invalid endpoint: write http://HOST:PORT")
    if not _is_port(split):
        raise ValueError("the cache's s3:// has an endpoint with an invalid port")
    return text.rstrip("/")


def _split(kind: str, address: str) -> SplitResult:
    try:
        return urlsplit(address)
    except ValueError:  # its text may repeat the password
        raise ValueError(f"the cache's {kind} has an address that cannot be parsed") from None


def _is_port(split: SplitResult) -> bool:
    try:
        return split.port != 0
    except ValueError:
        return False


def _parameters(kind: str, query: str, *allowed: str) -> dict[str, str]:
    values: dict[str, str] = {}
    for part in query.split("&") if query else ():
        name, _, value = part.partition("=")
        if name not in allowed:
            shown = f" {name}" if _PARAMETER.fullmatch(name) else ""
            raise ValueError(
                f"the cache's {kind} has an unknown parameter{shown}: it knows {', '.join(allowed)}"
            )
        if name in values:
            raise ValueError(f"the cache's {kind} has {name} twice: keep one")
        values[name] = unquote(value)
        if not value or not values[name].isprintable():
            raise ValueError(f"the cache's {kind} has a {name} without a value")
    return values


def _size(kind: str, values: dict[str, str], default: _Size) -> int | _Size:
    if "max" not in values:
        return default
    try:
        return parse_size(values["max"])
    except ValueError as fault:
        raise ValueError(f"the cache's {kind} has max={values['max']}: {fault}") from None


_PARSERS: dict[str, Callable[[str, str], TierSpec]] = {
    "memory": _memory,
    "disk": _disk,
    **dict.fromkeys(("redis", "rediss", "unix"), _redis),
    "s3": _objects,
}
