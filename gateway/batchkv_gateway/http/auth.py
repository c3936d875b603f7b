"""Who sends a request: the owner of its API key, or ``local``."""

from __future__ import annotations

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from batchkv_gateway.errors import UNAUTHORIZED, ApiError
from batchkv_gateway.keys.store import LOCAL, KeyStore

MAX_KEY_CHARS = 256


class Authenticated:
    """Gives each request its owner, in ``state.owner``, or refuses it (401).

    On loopback no key is needed until there is one. Beyond loopback one is always needed.
    """

    def __init__(self, app: ASGIApp, keys: KeyStore, *, is_open: bool) -> None:
        self._app, self._keys, self._is_open = app, keys, is_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http":
            given = Headers(scope=scope).getlist("authorization")
            owner = await run_in_threadpool(self._owner, given)
            scope.setdefault("state", {})["owner"] = owner
        await self._app(scope, receive, send)

    def _owner(self, given: list[str]) -> str:
        if self._is_open and not self._keys.has_any():
            return LOCAL
        scheme, _, key = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        owner = None
        if scheme.lower() == "bearer" and len(key) <= MAX_KEY_CHARS:
            owner = self._keys.owner_of(key.strip())
        if owner is None:
            raise ApiError(
                UNAUTHORIZED,
                "this gateway needs a key of its own as the API key: ask its operator, who makes "
                "one with `batchkv keys add NAME`",
                code="invalid_api_key",
            )
        return owner
