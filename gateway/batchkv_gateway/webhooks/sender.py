"""Sends the events of the outboxes, each target's by a thread of its own.

The script that ends a batch also puts its event into the outbox of each target. An event stays
there until its target has accepted it. So it is sent at least once, also after a kill. Whoever
takes an event defers it for ``TAKEN_SECONDS`` in the same script. So two gateways do not send it at
the same time, and it is free again after a kill.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Sequence
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from batchkv_gateway import redis_keys, scripts
from batchkv_gateway.webhooks.delivery import DeliveryError, deliver
from batchkv_gateway.webhooks.events import KEEP_SECONDS, Event
from batchkv_gateway.webhooks.targets import Target
from batchkv_producer.server.memory_use import at_once

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
TAKEN_SECONDS = 60
REST_SECONDS = 3.0  # after an error of Redis
STOP_SECONDS = 3.0
# Pauses between two tries; the last one is repeated for as long as events are kept.
PAUSES = (5, 30, 120, 600, 1800, 3600, 7200)


class Webhooks:
    """One gateway's senders. Without targets it does nothing."""

    def __init__(self, connection: Redis, targets: Sequence[Target], secret: bytes) -> None:
        self._connection, self._secret = connection, secret
        self._context = ssl.create_default_context() if any(t.is_tls for t in targets) else None
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._loop, args=[each], name="webhooks", daemon=True)
            for each in targets
        ]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End. An event that is being sent gets a moment; else it is sent again later."""
        self._stopping.set()
        deadline = time.monotonic() + STOP_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _loop(self, target: Target) -> None:
        while not self._stopping.is_set():
            rest = LOOK_SECONDS
            try:
                rest = 0.0 if self.send_next(target) else LOOK_SECONDS
            except RedisError as fault:
                log.warning("Redis: %s", fault)
                rest = REST_SECONDS
            except Exception:
                log.exception("a webhook cannot be sent; it is tried again")
            self._stopping.wait(rest)

    def send_next(self, target: Target) -> bool:
        """Send the event that is due first. False if none is due."""
        outbox, events = redis_keys.outbox(target.name), redis_keys.events(target.name)
        taken = scripts.take_due(self._connection, outbox, events, TAKEN_SECONDS)
        if taken is None:
            return False
        event_id, stored = taken
        event = Event.unpacked(event_id, stored)
        if event is None:
            log.warning("event %s for %s cannot be read, and is dropped", event_id, target.shown)
            self._drop(target, event_id)
            return True
        try:
            deliver(target, event, self._secret, self._context)
        except DeliveryError as fault:
            self._defer(target, event, str(fault))
        else:
            self._drop(target, event_id)
        return True

    def _defer(self, target: Target, event: Event, why: str) -> None:
        """Try again later, or not at all if the event is too old then."""
        pause = PAUSES[min(event.num_tries, len(PAUSES) - 1)]
        now = int(time.time())
        if now + pause > event.created + KEEP_SECONDS:
            log.warning(
                "event %s for %s is dropped after a day: %s", event.event_id, target.shown, why
            )
            self._drop(target, event.event_id)
            return
        if event.num_tries == 0:
            log.warning("event %s for %s is tried again: %s", event.event_id, target.shown, why)
        again = Event(event.event_id, event.created, event.body, event.num_tries + 1)
        with self._connection.pipeline(transaction=True) as pipeline:
            pipeline.hset(redis_keys.events(target.name), event.event_id, again.packed())
            pipeline.zadd(redis_keys.outbox(target.name), {event.event_id: now + pause})
            pipeline.execute()

    def _drop(self, target: Target, event_id: str) -> None:
        def delete(pipeline: Any) -> None:
            pipeline.zrem(redis_keys.outbox(target.name), event_id)
            pipeline.hdel(redis_keys.events(target.name), event_id)

        at_once(self._connection, delete)
