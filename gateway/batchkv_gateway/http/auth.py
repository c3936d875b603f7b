"""Who sends a request: the owner of its API key, the browser of a session, or ``local``."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Receive, Scope, Send

from batchkv_gateway.errors import FORBIDDEN, UNAUTHORIZED, ApiError
from batchkv_gateway.http.together import Together
from batchkv_gateway.keys.caller import NO_DEFAULTS, Defaults, caller_of
from batchkv_gateway.keys.sessions import Sessions
from batchkv_gateway.keys.store import ApiKey, KeyStore

MAX_KEY_CHARS = 256
METRICS = "/metrics"
REFUSED = ApiKey(key_id="", name="", created=0)  # stands for a key that is wrong, or none
OWN_HEADER = "x-batchkv-request"  # pages of other sites cannot send it
PAGE = "/page/"
NOBODY = REFUSED.key_id
_SHORT = ("owner", "sees_all", "reads_metrics", "cache_salt")


class Authenticated:
    """Gives each request its caller, or refuses it (401).

    On loopback no key is needed until there is one. Beyond loopback one is always needed.
    Routes read from ``request.state``:

    - ``caller``: the ``Caller``, and by themselves its ``owner``, ``sees_all``, ``reads_metrics``
      and ``cache_salt``.
    - ``key``: the key as ``ApiKey``; None for ``local``.

    The page itself has no secrets, so ``/`` and ``/page/`` are open. There the owner is "" if the
    caller has neither key nor session. The session that `serve --open` began is like ``local``.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: KeyStore,
        sessions: Sessions,
        *,
        is_open: bool,
        defaults: Defaults = NO_DEFAULTS,
    ) -> None:
        self._app, self._keys, self._sessions, self._is_open = app, keys, sessions, is_open
        self._defaults = defaults
        self._lookups = Together[str, ApiKey | None](self._look_up)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http":
            key = REFUSED if is_asset(scope["path"]) else await self._key(scope)
            if key is not None and key.reads_metrics and scope["path"] != METRICS:
                raise ApiError(
                    FORBIDDEN,
                    f"this key reads only {METRICS}: use another key",
                    code="forbidden",
                )
            caller = caller_of(key, self._defaults)
            state = scope.setdefault("state", {})
            state |= {"key": key, "caller": caller}
            state |= {name: getattr(caller, name) for name in _SHORT}
        await self._app(scope, receive, send)

    async def _key(self, scope: Scope) -> ApiKey | None:
        """The key of a request; None where none is needed. Raises ApiError (401)."""
        headers = Headers(scope=scope)
        given = headers.getlist("authorization")
        key = await self._lookups.get(_bearer(given))
        cookie = "" if given else session_cookie(scope)
        if key is REFUSED and cookie:
            session = await run_in_threadpool(self._sessions.find, cookie)
            if session is not None:
                _check_own(scope, headers)
                return session.key
        if key is REFUSED and not scope["path"].startswith(PAGE):
            raise _unauthorized(is_given=bool(_bearer(given)))
        return key

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


def _unauthorized(*, is_given: bool = False) -> ApiError:
    why = "does not know this API key" if is_given else "needs an API key that was made for it"
    return ApiError(
        UNAUTHORIZED,
        f"this gateway {why}. Its operator makes keys with `batchkv keys add NAME`",
        code="invalid_api_key",
    )


def is_asset(path: str) -> bool:
    """Whether a path is a file of the page, which anybody may read."""
    return path == "/" or (path.startswith(PAGE) and "." in path.rpartition("/")[2])


def cookie_name(headers: Headers) -> str:
    """The name of the session's cookie. Browsers share cookies among the ports of a machine."""
    port = headers.get("host", "").rpartition(":")[2]
    return f"batchkv-session-{port}" if port.isdecimal() else "batchkv-session"


def session_cookie(scope: Scope) -> str:
    """The cookie of the page's session, or "". Requests of other sites never have one."""
    if scope.get("state", {}).get("is_cross_origin"):
        return ""
    headers = Headers(scope=scope)
    return cookie_parser(headers.get("cookie", "")).get(cookie_name(headers), "")


def _check_own(scope: Scope, headers: Headers) -> None:
    """Raise ApiError for a change that the page itself did not ask for."""
    if scope["method"] not in ("GET", "HEAD") and OWN_HEADER not in headers:
        raise ApiError(
            FORBIDDEN, f"a request with the page's cookie needs the header {OWN_HEADER}: 1",
            code="csrf",
        )  # fmt: skip
