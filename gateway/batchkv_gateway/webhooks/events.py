"""Events: a batch is over. They have ids, a state and counts, and no prompt and no answer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from batchkv_gateway import redis_keys
from batchkv_gateway.scripts import Command

KEEP_SECONDS = 86_400  # in which an event is sent; then it is dropped
FORGET_SECONDS = 2 * KEEP_SECONDS  # after which an outbox that no gateway sends is deleted
_BATCH = "batch_"


@dataclass(frozen=True, slots=True)
class Event:
    """One event in the outbox of one target. ``body`` is what is sent and signed."""

    event_id: str
    created: int
    body: str
    num_tries: int = 0

    def packed(self) -> str:
        """The event as Redis stores it."""
        return json.dumps([self.created, self.num_tries, self.body])

    @classmethod
    def unpacked(cls, event_id: str, text: bytes) -> Event | None:
        """The event that Redis stores; None if it cannot be read."""
        try:
            created, num_tries, body = json.loads(text)
        except (ValueError, TypeError, RecursionError):
            return None
        is_right = type(created) is int and type(num_tries) is int and isinstance(body, str)
        return cls(event_id, created, body, num_tries) if is_right else None


def ended(batch_id: str, status: str, counts: Mapping[str, int], now: int) -> Event:
    """The event of a batch's end. A batch ends once, so that its event's id follows from its."""
    event_id = f"evt_{batch_id.removeprefix(_BATCH)}"
    data = {"id": batch_id, "status": status, "request_counts": dict(counts)}
    body = {
        "id": event_id,
        "object": "event",
        "created_at": now,
        "type": f"batch.{status}",
        "data": data,
    }
    return Event(event_id, now, json.dumps(body, separators=(",", ":")))


def commands(event: Event, targets: Iterable[str]) -> list[Command]:
    """Put an event into the outboxes of these targets."""
    found: list[Command] = []
    for name in targets:
        outbox, events = redis_keys.outbox(name), redis_keys.events(name)
        found += [
            ("hset", events, event.event_id, event.packed()),
            ("zadd", outbox, event.created, event.event_id),
            ("expire", events, FORGET_SECONDS),
            ("expire", outbox, FORGET_SECONDS),
        ]
    return found
