"""All routes of the page."""

from __future__ import annotations

import json

from starlette.routing import Route

from batchkv_gateway.keys.sessions import Sessions
from batchkv_gateway.page.assets import Assets
from batchkv_gateway.page.event_routes import EventRoutes
from batchkv_gateway.page.fact_routes import FactRoutes
from batchkv_gateway.page.feed import Feed
from batchkv_gateway.page.reading import Reader
from batchkv_gateway.page.session_routes import SessionRoutes
from batchkv_gateway.parts import Parts


def page_routes(parts: Parts) -> list[Route]:
    """The page's files, its sessions, its facts and its events."""

    def history() -> str:
        return json.dumps(parts.history.points(), separators=(",", ":"))

    feed = Feed(Reader(parts.connection).read, history, parts.stopping)
    return [
        *Assets().routes(),
        *SessionRoutes(parts.keys, Sessions(parts.connection, parts.keys)).routes(),
        *FactRoutes(parts).routes(),
        *EventRoutes(feed).routes(),
    ]
