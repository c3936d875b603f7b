"""Who sends a request: the owner of its API key, or ``local``."""

from __future__ import annotations

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from batchkv_gateway.errors import UNAUTHORIZED, ApiError
from batchkv_gateway.keys.store import LOCAL, ApiKey, KeyStore

MAX_KEY_CHARS = 256


class Authenticated:
    """Gives each request its caller, or refuses it (401).

    On loopback no key is needed until there is one. Beyond loopback one is always needed.
    Routes read from ``request.state``:

    - ``owner``: the id of the key, or ``local``. It owns what the request makes.
    - ``key``: the key as ``ApiKey``; None for ``local``.
    - ``sees_all``: whether the request may see and manage the batches of all owners, and the
      workers: an admin's key, or ``local``.
    - ``reads_metrics``: whether it may read ``/metrics``.
    """

    def __init__(self, app: ASGIApp, keys: KeyStore, *, is_open: bool) -> None:
        self._app, self._keys, self._is_open = app, keys, is_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http":
            given = Headers(scope=scope).getlist("authorization")
            key = await run_in_threadpool(self._key, given)
            state = scope.setdefault("state", {})
            state["key"], state["owner"] = key, key.key_id if key else LOCAL
            state["sees_all"] = key is None or key.is_admin
            state["reads_metrics"] = key is None or key.is_admin or key.reads_metrics
        await self._app(scope, receive, send)

    def _key(self, given: list[str]) -> ApiKey | None:
        """The key of these headers; None where none is needed. Raises ApiError (401)."""
        if self._is_open and not self._keys.has_any():
            return None
        scheme, _, key = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        found = None
        if scheme.lower() == "bearer" and len(key) <= MAX_KEY_CHARS:
            found = self._keys.find(key.strip())
        if found is None:
            raise ApiError(
                UNAUTHORIZED,
                "this gateway needs a key of its own as the API key: ask its operator, who makes "
                "one with `batchkv keys add NAME`",
                code="invalid_api_key",
            )
        return found
