"""Who sends a request: the owner of its API key, or ``local``."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from batchkv_gateway.errors import FORBIDDEN, UNAUTHORIZED, ApiError
from batchkv_gateway.http.together import Together
from batchkv_gateway.keys.caller import NO_DEFAULTS, Defaults, caller_of
from batchkv_gateway.keys.store import ApiKey, KeyStore

MAX_KEY_CHARS = 256
METRICS = "/metrics"
REFUSED = ApiKey(key_id="", name="", created=0)  # stands for a key that is wrong
_SHORT = ("owner", "sees_all", "reads_metrics", "cache_salt")


class Authenticated:
    """Gives each request its caller, or refuses it (401).

    On loopback no key is needed until there is one. Beyond loopback one is always needed.
    Routes read from ``request.state``:

    - ``caller``: the ``Caller``, and by themselves its ``owner``, ``sees_all``, ``reads_metrics``
      and ``cache_salt``.
    - ``key``: the key as ``ApiKey``; None for ``local``.
    """

    def __init__(
        self, app: ASGIApp, keys: KeyStore, *, is_open: bool, defaults: Defaults = NO_DEFAULTS
    ) -> None:
        self._app, self._keys, self._is_open = app, keys, is_open
        self._defaults = defaults
        self._lookups = Together[str, ApiKey | None](self._look_up)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http":
            given = Headers(scope=scope).getlist("authorization")
            key = await self._lookups.get(_bearer(given))
            if key is REFUSED:
                raise _unauthorized()
            if key is not None and key.reads_metrics and scope["path"] != METRICS:
                raise ApiError(
                    FORBIDDEN, f"this key reads {METRICS} alone: use another key", code="forbidden"
                )
            caller = caller_of(key, self._defaults)
            state = scope.setdefault("state", {})
            state |= {"key": key, "caller": caller}
            state |= {name: getattr(caller, name) for name in _SHORT}
        await self._app(scope, receive, send)

    def _look_up(self, given: Sequence[str]) -> Sequence[ApiKey | None]:
        """The keys of these texts: None where none is needed, and ``REFUSED`` for a wrong one."""
        has_any, found = self._keys.find_all(given)
        if self._is_open and not has_any:
            return [None] * len(given)
        return [REFUSED if key is None else key for key in found]


def _bearer(given: list[str]) -> str:
    """The text of the one key in these headers; "" if there is none."""
    scheme, _, key = given[0].partition(" ") if len(given) == 1 else ("", "", "")
    return key.strip() if scheme.lower() == "bearer" and len(key) <= MAX_KEY_CHARS else ""


def _unauthorized() -> ApiError:
    return ApiError(
        UNAUTHORIZED,
        "this gateway needs a key of its own as the API key: ask its operator, who makes "
        "one with `batchkv keys add NAME`",
        code="invalid_api_key",
    )
