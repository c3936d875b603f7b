"""Sessions of the page in Redis. A browser's cookie is 256 random bits, and Redis has its digest.

A session has the rights of the key that began it, and ends when this key is removed. The session
that `batchkv serve --open` begins is its operator's, who may use Redis anyway.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from redis import Redis

from batchkv_gateway import redis_keys
from batchkv_gateway.keys.store import ApiKey, KeyStore

SESSION_SECONDS = 7 * 86_400
TICKET_SECONDS = 60
OPERATOR = "operator"
MAX_CHARS = 128  # of a cookie or a ticket


@dataclass(frozen=True, slots=True)
class Session:
    """Whose session it is: the key's, or for None the operator's."""

    key: ApiKey | None


class Sessions:
    """The sessions of one server."""

    def __init__(self, connection: Redis, keys: KeyStore) -> None:
        self._connection, self._keys = connection, keys

    def begin(self, key: ApiKey | None) -> str:
        """Begin a session and return its cookie. None: the operator's."""
        return self._new(redis_keys.session, key.key_id if key else OPERATOR, SESSION_SECONDS)

    def make_ticket(self) -> str:
        """A ticket with which the operator's browser begins one session, within a minute."""
        return self._new(redis_keys.ticket, OPERATOR, TICKET_SECONDS)

    def use_ticket(self, ticket: str) -> bool:
        """Whether this ticket is good. It is used up."""
        if not 0 < len(ticket) <= MAX_CHARS:
            return False
        key = redis_keys.ticket(_digest(ticket))
        return bool(self._connection.delete(key))  # one of several calls deletes it

    def find(self, cookie: str) -> Session | None:
        """The session of a cookie. None if it has ended, or if its key was removed."""
        if not 0 < len(cookie) <= MAX_CHARS:
            return None
        whose: Any = self._connection.hget(redis_keys.session(_digest(cookie)), "whose")
        if whose is None:
            return None
        if whose == OPERATOR.encode():
            return Session(None)
        key = self._keys.by_id(whose.decode("utf-8", "replace"))
        return Session(key) if key else None

    def end(self, cookie: str) -> None:
        """End a session, if there is one."""
        if 0 < len(cookie) <= MAX_CHARS:
            self._connection.delete(redis_keys.session(_digest(cookie)))

    def _new(self, key_of: Callable[[str], str], whose: str, seconds: int) -> str:
        secret = secrets.token_urlsafe(32)
        key = key_of(_digest(secret))
        with self._connection.pipeline(transaction=True) as pipeline:
            pipeline.hset(key, "whose", whose)
            pipeline.expire(key, seconds)
            pipeline.execute()
        return secret


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()
