"""API keys in Redis. A key is ``bkv-ID-SECRET``: 8 hex digits, and 128 random bits as 32.

Redis stores the SHA-256 of the whole key. The bits are random, so nobody finds the key from it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis import Redis

from batchkv_gateway import redis_keys
from batchkv_producer.errors import NotFoundError, UsageError

LOCAL = "local"  # the owner of what is made without a key
_KEY = re.compile(r"bkv-([0-9a-f]{8})-[0-9a-f]{32}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NO_DIGEST = "0" * 64


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key without its secret. ``key_id`` owns the files and batches that are made with it.

    ``is_admin``: it sees and manages the batches of all keys, and the workers.
    ``reads_metrics``: it may read ``/metrics``, and nothing else. ``is_private``: its rows share no
    prefix with those of other keys. ``max_rows`` may be open at once, and files of ``max_bytes`` be
    kept; 0 is the gateway's default.
    """

    key_id: str
    name: str
    created: int
    is_admin: bool = False
    reads_metrics: bool = False
    is_private: bool = False
    max_rows: int = 0
    max_bytes: int = 0


class KeyStore:
    """The keys of one server."""

    def __init__(self, connection: Redis) -> None:
        self._connection = connection

    def add(
        self,
        name: str,
        *,
        is_admin: bool = False,
        reads_metrics: bool = False,
        is_private: bool = False,
        max_rows: int = 0,
        max_bytes: int = 0,
    ) -> str:
        """Make a key and return it. It is stored nowhere. Raises UsageError for a bad name.

        The rights and limits are those of ``ApiKey``.
        """
        if is_admin and reads_metrics:
            raise UsageError("an --admin key reads metrics anyhow; a --metrics key does only that")
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"a key's name has 1 to 64 letters, digits, dots, hyphens and underscores and "
                f"begins with a letter or digit; got {name[:80]!r}"
            )
        if any(key.name == name for key in self.all()):
            raise UsageError(f"there is a key {name} already: `batchkv keys remove {name}` first")
        key_id = secrets.token_hex(4)
        key = f"bkv-{key_id}-{secrets.token_hex(16)}"
        facts: dict[str, Any] = {"name": name, "digest": _digest(key), "created": int(time.time())}
        facts |= {"admin": is_admin, "metrics": reads_metrics, "private": is_private}
        facts |= {"rows": max_rows, "bytes": max_bytes}
        self._connection.hset(redis_keys.KEYS, key_id, json.dumps(facts))
        return key

    def all(self) -> list[ApiKey]:
        """The keys, by name."""
        stored: Any = self._connection.hgetall(redis_keys.KEYS)
        found = [
            _key(key_id.decode("utf-8", "replace"), facts)
            for key_id, raw in stored.items()
            if (facts := _facts(raw))
        ]
        return sorted(found, key=lambda key: key.name)

    def remove(self, name: str) -> None:
        """Delete a key. Its files and batches stay until they expire."""
        found = next((key for key in self.all() if key.name == name), None)
        if found is None:
            raise NotFoundError(f"there is no key {name[:80]!r}: `batchkv keys list` lists them")
        self._connection.hdel(redis_keys.KEYS, found.key_id)

    def has_any(self) -> bool:
        """Whether requests need a key."""
        return bool(self._connection.hlen(redis_keys.KEYS))

    def find(self, key: str) -> ApiKey | None:
        """The facts of a whole key, or None if it is wrong."""
        return self.find_all([key])[1][0]

    def find_all(self, keys: Sequence[str]) -> tuple[bool, list[ApiKey | None]]:
        """Whether there is any key, and the facts of these whole keys, None for a wrong one."""
        parts = {key: _KEY.fullmatch(key) for key in keys}
        ids = {key: found[1] for key, found in parts.items() if found}
        with self._connection.pipeline(transaction=False) as pipeline:
            pipeline.hlen(redis_keys.KEYS)
            for key_id in ids.values():
                pipeline.hget(redis_keys.KEYS, key_id)
            num, *stored = pipeline.execute()
        raws = dict(zip(ids, stored, strict=True))
        found = {key: _checked(key, ids.get(key, ""), raws.get(key)) for key in parts}
        return bool(num), [found[key] for key in keys]

    def by_id(self, key_id: str) -> ApiKey | None:
        """The key with this id, or None if it was removed."""
        raw: Any = self._connection.hget(redis_keys.KEYS, key_id)
        facts = _facts(raw) if raw is not None else None
        return _key(key_id, facts) if facts else None


def _checked(key: str, key_id: str, raw: bytes | None) -> ApiKey | None:
    """The facts of a whole key whose id has these facts stored; None if it is wrong."""
    facts = _facts(raw) if raw is not None else None
    # Digests of equal length are compared in constant time, also for an unknown id.
    is_right = hmac.compare_digest(_digest(key), facts["digest"] if facts else _NO_DIGEST)
    return _key(key_id, facts) if key_id and facts and is_right else None


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()


def _key(key_id: str, facts: dict[str, Any]) -> ApiKey:
    """The key of checked facts. Only ``true`` itself gives a right.

    A limit that cannot be read is the smallest.
    """
    return ApiKey(
        key_id=key_id,
        name=facts["name"],
        created=facts["created"],
        is_admin=facts.get("admin") is True,
        reads_metrics=facts.get("metrics") is True,
        is_private=facts.get("private", False) is not False,
        max_rows=_limit(facts.get("rows", 0)),
        max_bytes=_limit(facts.get("bytes", 0)),
    )


def _limit(value: object) -> int:
    return value if type(value) is int and value >= 0 else 1


def _facts(raw: bytes) -> dict[str, Any] | None:
    """The facts of a stored key; None if they cannot be read."""
    try:
        found = json.loads(raw)
        kinds = {"name": str, "digest": str, "created": int}
        is_right = all(isinstance(found[name], kind) for name, kind in kinds.items())
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return found if is_right and found["digest"].isascii() else None
