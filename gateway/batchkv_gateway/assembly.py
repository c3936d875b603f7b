"""Puts a gateway together: its parts, its routes, and around them keys and limits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from redis import Redis
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import ASGIApp

from batchkv_gateway.batches.driver import Driver
from batchkv_gateway.batches.steps import Steps
from batchkv_gateway.batches.store import Batches
from batchkv_gateway.files.folder import Folder
from batchkv_gateway.files.records import Files
from batchkv_gateway.http.auth import Authenticated
from batchkv_gateway.http.batch_routes import BatchRoutes
from batchkv_gateway.http.errors import HANDLERS
from batchkv_gateway.http.file_routes import FileRoutes
from batchkv_gateway.http.limits import Limits, own_names
from batchkv_gateway.http.live_routes import LiveRoutes
from batchkv_gateway.http.model_routes import ModelRoutes
from batchkv_gateway.http.sites import checked_origins
from batchkv_gateway.kept_facts import KeptFacts
from batchkv_gateway.keys.caller import Defaults
from batchkv_gateway.keys.quotas import Quotas
from batchkv_gateway.keys.sessions import Sessions
from batchkv_gateway.keys.store import KeyStore
from batchkv_gateway.live.calls import Calls
from batchkv_gateway.metrics.instruments import Measured
from batchkv_gateway.metrics.routes import MetricsRoutes
from batchkv_gateway.native.routes import native_routes
from batchkv_gateway.page.routes import page_routes
from batchkv_gateway.parts import Parts
from batchkv_gateway.settings import GatewaySettings, is_loopback
from batchkv_gateway.stopping import Stopping
from batchkv_gateway.webhooks.sender import Webhooks
from batchkv_gateway.webhooks.targets import checked_targets
from batchkv_gateway.worker_history import WorkerHistory
from batchkv_producer.live import Lane
from batchkv_producer.server.home import home_from_environment


@contextmanager
def running_parts(connection: Redis, settings: GatewaySettings) -> Iterator[Parts]:
    """The parts of one gateway. Its background work runs until the block ends."""
    files = Files(connection, Folder(home_from_environment().path))
    files.delete_pending()
    quotas = Quotas(connection)
    batches = Batches(connection, files, quotas)
    driver = Driver(connection, Steps(connection, files, settings), batches, files)
    history = WorkerHistory(connection)
    driver.start()
    webhooks = Webhooks(connection, checked_targets(settings.webhooks), settings.webhook_secret)
    webhooks.start()
    stopping = Stopping()
    calls = Calls(Lane(connection), stopping)
    history.start()
    try:
        keys = KeyStore(connection)
        yield Parts(
            *(connection, settings, keys, quotas, files, batches, driver),
            calls=calls,
            stopping=stopping,
            history=history,
            facts=KeptFacts(connection),
        )
    finally:
        history.stop()
        calls.close()
        driver.stop()
        webhooks.stop()


def routes_of(parts: Parts) -> list[Route]:
    """All routes, in the order in which they are tried."""
    return [
        *FileRoutes(parts.files, parts.settings).routes(),
        *BatchRoutes(parts.batches, parts.driver).routes(),
        *LiveRoutes(parts.connection, parts.calls).routes(),
        *ModelRoutes(parts.connection).routes(),
        *native_routes(parts),
        *MetricsRoutes(parts.connection, parts.instruments).routes(),
        *page_routes(parts),
    ]


def make_app(parts: Parts) -> ASGIApp:
    """The application."""
    app = Starlette(routes=routes_of(parts), exception_handlers=HANDLERS)
    app.router.redirect_slashes = False
    settings = parts.settings
    sessions = Sessions(parts.connection, parts.keys)
    keys = Authenticated(
        app,
        parts.keys,
        sessions,
        is_open=is_loopback(settings.host),
        defaults=Defaults(settings.key_rows, settings.key_bytes, settings.is_private),
    )
    names = own_names((settings.host, *settings.allow_hosts))
    origins = checked_origins(settings.cors)
    limits = Limits(keys, names, settings.max_file_bytes, origins)
    return Measured(limits, parts.instruments)
