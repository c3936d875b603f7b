"""All routes of the API of batchkv itself."""

from __future__ import annotations

from starlette.routing import Route

from batchkv_gateway.native.change_routes import ChangeRoutes
from batchkv_gateway.native.read_routes import ReadRoutes
from batchkv_gateway.native.result_routes import ResultRoutes
from batchkv_gateway.native.worker_routes import WorkerRoutes
from batchkv_gateway.parts import Parts


def native_routes(parts: Parts) -> list[Route]:
    """The routes, in the order in which they are tried."""
    rooms = (ReadRoutes(parts), ChangeRoutes(parts), ResultRoutes(parts), WorkerRoutes(parts))
    return [route for room in rooms for route in room.routes()]
