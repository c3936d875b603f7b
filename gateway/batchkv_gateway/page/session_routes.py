"""Begins and ends sessions of the page: by a key, or by the ticket of `serve --open`."""

from __future__ import annotations

import ipaddress

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from batchkv_gateway.errors import FORBIDDEN, UNAUTHORIZED, ApiError
from batchkv_gateway.http.answer import json_answer
from batchkv_gateway.http.asked import json_object
from batchkv_gateway.http.auth import MAX_KEY_CHARS, NOBODY, cookie_name, session_cookie
from batchkv_gateway.keys.sessions import SESSION_SECONDS, Sessions
from batchkv_gateway.keys.store import ApiKey, KeyStore

OPERATOR_NAME = "operator of this gateway"


class SessionRoutes:
    """The handlers."""

    def __init__(self, keys: KeyStore, sessions: Sessions) -> None:
        self._keys, self._sessions = keys, sessions

    def routes(self) -> list[Route]:
        """The routes of this room."""
        return [
            Route("/page/session", self.who, methods=["GET"]),
            Route("/page/login", self.login, methods=["POST"]),
            Route("/page/exchange", self.exchange, methods=["POST"]),
            Route("/page/logout", self.logout, methods=["POST"]),
        ]

    async def who(self, request: Request) -> Response:
        """Whose session it is, and what it may do."""
        state = request.state
        key: ApiKey | None = state.key
        return json_answer(
            {
                "is_signed_in": state.owner != NOBODY,
                "has_session": bool(session_cookie(request.scope)),
                "name": key.name if key else OPERATOR_NAME,
                "sees_all": state.sees_all,
            }
        )

    async def login(self, request: Request) -> Response:
        """Begin a session with a key."""
        given = (await json_object(request, {"key"})).get("key")
        key = None
        if isinstance(given, str) and len(given) <= MAX_KEY_CHARS:
            key = await run_in_threadpool(self._keys.find, given.strip())
        if key is None:
            raise ApiError(
                UNAUTHORIZED,
                "this is no key of this gateway: `batchkv keys add NAME` makes one, and shows it "
                "once",
                code="invalid_api_key",
            )
        if key.reads_metrics:
            raise ApiError(FORBIDDEN, "this key reads only /metrics: use another key")
        return await self._begun(request, key)

    async def exchange(self, request: Request) -> Response:
        """Begin the operator's session with a ticket, on this machine alone."""
        ticket = (await json_object(request, {"ticket"})).get("ticket")
        if not is_of_this_machine(request):
            raise ApiError(FORBIDDEN, "a ticket is for this machine's own browser", code="ticket")
        if not isinstance(ticket, str) or not await run_in_threadpool(
            self._sessions.use_ticket, ticket
        ):
            raise ApiError(
                UNAUTHORIZED,
                "this link was used already, or is older than a minute: sign in with a key, or "
                "start `batchkv serve --open` again",
                code="ticket",
            )
        return await self._begun(request, None)

    async def logout(self, request: Request) -> Response:
        """End the session, also for whoever else has its cookie."""
        await run_in_threadpool(self._sessions.end, session_cookie(request.scope))
        answer = json_answer({"is_signed_in": False})
        answer.delete_cookie(cookie_name(request.headers), httponly=True, samesite="strict")
        return answer

    async def _begun(self, request: Request, key: ApiKey | None) -> Response:
        cookie = await run_in_threadpool(self._sessions.begin, key)
        answer = json_answer({"is_signed_in": True})
        # A proxy may have TLS where the gateway has none. The browser says what it sees.
        is_secure = request.url.scheme == "https" or request.headers.get("origin", "").startswith(
            "https:"
        )
        answer.set_cookie(
            cookie_name(request.headers),
            cookie,
            max_age=SESSION_SECONDS,
            httponly=True,
            secure=is_secure,
            samesite="strict",
        )
        return answer


def is_of_this_machine(request: Request) -> bool:
    """Whether the connection comes from this machine."""
    try:
        address = ipaddress.ip_address((request.client.host if request.client else "") or "")
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
