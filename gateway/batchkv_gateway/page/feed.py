"""The events of the page: what changed since the last one, read once for all of its viewers.

A task of the event loop reads while there is a viewer, every two seconds. Viewers of the same owner
share what was read, and each gets the difference to what it has. Ten viewers cost what one does.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from redis.exceptions import RedisError
from starlette.concurrency import run_in_threadpool

from batchkv_gateway.keys.caller import Caller
from batchkv_gateway.stopping import Stopping
from batchkv_producer.errors import BatchkvError
from batchkv_producer.server.memory_use import FULL, is_full

log = logging.getLogger(__name__)

TICK_SECONDS = 2.0
STREAM_SECONDS = 60.0  # then the browser opens a new stream, and shows its cookie again
QUIET_SECONDS = 10.0  # without a change, until a comment shows that the stream is alive
RETRY_MS = 500
TROUBLE = "the queue's server does not answer or refuses it: the page tries again"
BATCHES, WORKERS, HISTORY = "batches", "workers", "history"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What an audience sees: JSON of each batch by its id, in their order, and of the workers."""

    batches: dict[str, str] = field(default_factory=dict)
    workers: str = "[]"
    trouble: str = ""


Read = Callable[[Caller], Snapshot]


class _Channel:
    """The newest snapshot of one audience, and its viewers."""

    def __init__(self) -> None:
        self.snapshot: Snapshot | None = None
        self.changed = asyncio.Event()
        self.num_viewers = 0

    def publish(self, snapshot: Snapshot) -> None:
        """Wake the viewers if there is something new."""
        if snapshot == self.snapshot:
            return
        self.snapshot = snapshot
        self.changed.set()
        self.changed = asyncio.Event()


class Feed:
    """All streams of a gateway. It is used in the event loop alone; ``read`` runs in a thread."""

    def __init__(self, read: Read, history: Callable[[], str], stopping: Stopping) -> None:
        self._read, self._history, self._stopping = read, history, stopping
        self._channels: dict[Caller, _Channel] = {}
        self._task: asyncio.Task[None] | None = None
        self._joined = asyncio.Event()

    async def stream(self, audience: Caller) -> AsyncIterator[bytes]:
        """The events for one viewer."""
        loop = asyncio.get_running_loop()
        channel = self._join(audience)
        try:
            yield f"retry: {RETRY_MS}\n\n".encode()
            yield _event(HISTORY, self._history())
            seen, until = Snapshot(), loop.time() + STREAM_SECONDS
            is_first = True
            while loop.time() < until and not self._stopping.has_begun:
                changed, now = channel.changed, channel.snapshot
                if now is not None and (is_first or now != seen):
                    yield b"".join(_differences(seen, now, is_first=is_first))
                    seen, is_first = now, False
                try:
                    await asyncio.wait_for(changed.wait(), QUIET_SECONDS)
                except TimeoutError:
                    yield b": still here\n\n"
        finally:
            self._leave(audience, channel)

    def _join(self, audience: Caller) -> _Channel:
        channel = self._channels.setdefault(audience, _Channel())
        channel.num_viewers += 1
        if channel.snapshot is None:
            self._joined.set()  # who comes first does not wait for the next tick
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())
        return channel

    def _leave(self, audience: Caller, channel: _Channel) -> None:
        channel.num_viewers -= 1
        if not channel.num_viewers and self._channels.get(audience) is channel:
            del self._channels[audience]

    async def _run(self) -> None:
        """Read for each audience, until nobody looks."""
        while self._channels:
            if self._stopping.has_begun:
                for channel in self._channels.values():
                    channel.changed.set()
                return
            for audience, channel in list(self._channels.items()):
                try:
                    channel.publish(await run_in_threadpool(self._read, audience))
                except (RedisError, BatchkvError) as fault:
                    log.warning("the page's events: %s", fault)
                    seen = channel.snapshot or Snapshot()
                    is_of_memory = isinstance(fault, RedisError) and is_full(fault)
                    trouble = f"the queue's server {FULL}" if is_of_memory else TROUBLE
                    channel.publish(Snapshot(seen.batches, seen.workers, trouble))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._joined.wait(), TICK_SECONDS)
            self._joined.clear()


def _event(name: str, data: str) -> bytes:
    return f"event: {name}\ndata: {data}\n\n".encode()


def _differences(seen: Snapshot, now: Snapshot, *, is_first: bool) -> list[bytes]:
    """The events that bring a viewer from one snapshot to the next."""
    found = []
    if is_first or now.batches != seen.batches or now.trouble != seen.trouble:
        fresh = [text for key, text in now.batches.items() if seen.batches.get(key) != text]
        head = json.dumps({"order": list(now.batches), "trouble": now.trouble})
        found.append(_event(BATCHES, f'{head[:-1]},"changed":[{",".join(fresh)}]}}'))
    if is_first or now.workers != seen.workers:
        found.append(_event(WORKERS, now.workers))
    return found
