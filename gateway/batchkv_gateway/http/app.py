"""Puts the application together: limits, then keys, then routes."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from redis import Redis
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import ASGIApp

from batchkv_gateway.http.auth import Authenticated
from batchkv_gateway.http.errors import HANDLERS
from batchkv_gateway.http.limits import Limits, own_names
from batchkv_gateway.keys.store import KeyStore
from batchkv_gateway.settings import GatewaySettings


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def make_app(connection: Redis, settings: GatewaySettings, routes: Sequence[Route]) -> ASGIApp:
    """The application of these routes."""
    app = Starlette(routes=routes, exception_handlers=HANDLERS)
    app.router.redirect_slashes = False
    keys = Authenticated(app, KeyStore(connection), is_open=is_loopback(settings.host))
    names = own_names((settings.host, *settings.allow_hosts))
    return Limits(keys, names, settings.max_file_bytes)
