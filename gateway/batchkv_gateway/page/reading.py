"""Reads what the page's events say: batches, their speed and time left, and workers."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from redis import Redis

from batchkv_gateway.keys.caller import Caller
from batchkv_gateway.native.listing import Listing, facts_of
from batchkv_gateway.page.feed import Snapshot
from batchkv_gateway.page.worker_facts import WorkerFacts
from batchkv_producer.monitor.open_batches import OpenBatches
from batchkv_producer.monitor.remaining import LEAST_SECONDS, seconds_left
from batchkv_producer.monitor.status import BatchStatus, read_batches

NEWEST = 50
MAX_OPEN = 200  # older batches that are not done are listed, too
OPEN_SECONDS = 5.0  # between two searches for them
SHARED_SECONDS = 1.5  # audiences that read within this time share the workers
SPEED_SECONDS = 60.0
MAX_SPEEDS = 1000
_CHANGING = ("read_at", "is_reconciled")  # these would make an event of every look


class Reader:
    """Reads for one feed, one audience after the other."""

    def __init__(self, connection: Redis) -> None:
        self._connection = connection
        self._listing = Listing(connection)
        self._workers = WorkerFacts(connection)
        self._workers_at = self._open_at = float("-inf")
        self._open_batches, self._open = OpenBatches(connection), list[str]()
        self._speeds = Speeds()

    def read(self, audience: Caller) -> Snapshot:
        """What an audience sees now."""
        now = time.monotonic()
        if now - self._workers_at >= SHARED_SECONDS:
            self._workers.look()
            self._workers_at = now
        if now - self._open_at >= OPEN_SECONDS:
            queues = {queue for worker in self._workers.found for queue in worker.queues}
            found = self._open_batches.find(queues) if queues else []
            self._open = [batch.batch_id for batch in found[:MAX_OPEN]]
            self._open_at = now
        still_open = read_batches(self._connection, self._open) if self._open else []
        left = seconds_left(still_open, self._workers.found)
        items = self._listing.page(audience, "", NEWEST, left).items
        if audience.sees_all:
            items += self._older(still_open, items, left)
        batches = {item["openai_id"] or item["batch_id"]: self._text(item, now) for item in items}
        return Snapshot(batches, self._workers.text)

    def _older(
        self, still_open: list[BatchStatus], items: list[dict[str, Any]], left: Mapping[str, float]
    ) -> list[dict[str, Any]]:
        """The facts of open batches that are not among the newest."""
        known = {item["batch_id"] for item in items}
        return [
            facts_of(batch, None, "", left)
            for batch in still_open
            if batch.batch_id not in known and not batch.is_done
        ]

    def _text(self, item: dict[str, Any], now: float) -> str:
        fields = {name: value for name, value in item.items() if name not in _CHANGING}
        speed = fields["tokens_per_second"] = self._speeds.of(item, now)
        if fields["seconds_left"] is not None:
            fields["seconds_left"] = rounded(soonest(item, fields["seconds_left"], speed))
        return json.dumps(fields, separators=(",", ":"))


class Speeds:
    """Tokens a second of batches over the last minute, from their counts at each look."""

    def __init__(self) -> None:
        self._counts: dict[str, deque[tuple[float, int]]] = {}

    def of(self, item: Mapping[str, Any], now: float) -> int | None:
        """The speed of a batch. None if it does not run, or was seen once only."""
        name = item["batch_id"]
        if item["is_done"] or not item["running"]:
            self._counts.pop(name, None)
            return None
        counts = self._counts.setdefault(name, deque())
        if not counts or counts[-1][0] < now:
            counts.append((now, item["completion_tokens"]))
        while len(counts) > 2 and counts[0][0] < now - SPEED_SECONDS:
            counts.popleft()
        if len(self._counts) > MAX_SPEEDS:
            del self._counts[next(iter(self._counts))]
        (begin, before), (end, after) = counts[0], counts[-1]
        speed = round(max(0, after - before) / (end - begin)) if end > begin else 0
        return speed if speed or end - begin >= SPEED_SECONDS / 2 else None


def soonest(item: Mapping[str, Any], seconds: float, speed: int | None) -> float:
    """The time left at the batch's own speed, if that is sooner.

    Workers tell their speed every ten seconds, and at first as that of the time before.
    """
    if not speed or not item["ok"]:
        return seconds
    num_open = item["total"] - item["num_ended"]
    own: float = num_open * item["completion_tokens"] / item["ok"] / speed
    return min(seconds, max(LEAST_SECONDS, own))


def rounded(seconds: float) -> int:
    """Seconds to about two digits, so that an estimate does not change at every look."""
    step = 1
    while seconds / step >= 60 and step < 3600:
        step *= 5
    return round(seconds / step) * step
