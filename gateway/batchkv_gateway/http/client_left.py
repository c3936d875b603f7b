"""Ends the work for a client that has left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive


class ClientLeftError(Exception):
    """The client has left; nobody reads the answer."""


@asynccontextmanager
async def while_client_stays(receive: Receive) -> AsyncIterator[None]:
    """Cancels the block when the client leaves, and raises ClientLeftError then.

    The body of the request must have been read.
    """
    task = asyncio.current_task()
    assert task is not None
    has_left = False

    async def watch() -> None:
        nonlocal has_left
        while (await receive())["type"] != "http.disconnect":
            pass
        has_left = True
        task.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if has_left and task.uncancel() == 0:
            raise ClientLeftError from None
        raise
    finally:
        watching.cancel()
