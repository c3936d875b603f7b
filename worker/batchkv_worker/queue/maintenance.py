"""Maintenance of a queue: take back lapsed jobs, give rows their error, drop old entries.

One worker does it in each interval, under a short lock of batchkv's own. RQ's lock lasts for 15
minutes. A worker that dies with that lock would stop all maintenance for as long. A round is made
of short steps. Between them the worker renews its leases and stores results.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from redis import Redis
from rq import Queue
from rq.serializers import JSONSerializer
from rq.worker_registration import clean_worker_registry

from batchkv_producer.errors import NotFoundError, WireError
from batchkv_producer.manage.reconcile import Reconciler, find_lost, settle_lost
from batchkv_producer.monitor.status import BatchStatus, read_batches
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.job import MAX_JOB_BYTES, ErrorCode, Result, decode_job, encode_result
from batchkv_producer.wire.transitions import ENOUGH_BYTES, Transitions
from batchkv_worker.queue.server_clock import ServerClock

log = logging.getLogger("batchkv.worker")

PAGE = 1000  # ids looked at in one round trip
BATCHES_PAGE = 100  # batches whose status is read at once: those before may take long
_OVER = object()
_REASONS = {
    "failed": (
        ErrorCode.ENGINE_ERROR,
        "the workers that ran it died or were lost; not tried again",
    ),
    "canceled": (ErrorCode.CANCELED, "canceled with one of RQ's own tools"),
}


class Maintenance:
    """One queue's maintenance. It remembers how far it has come in registries and batches.

    A round ends when nothing is left to do, or when its lock expires. ``lease_seconds`` are those
    of this worker's own leases.
    """

    def __init__(
        self, connection: Redis, queue: str, worker: str, lease_seconds: float = 60.0
    ) -> None:
        self._connection = connection
        self._queue = queue
        self._worker = worker
        self._lease_seconds = lease_seconds
        self._moves = Transitions(connection)
        self._offsets = dict.fromkeys(_REASONS, 0)
        self._reconciler = Reconciler(connection)
        self._batch_offset = 0
        self._audited, self._audited_lines = "", 0  # a batch, and how many of its lines
        self._clock = ServerClock(lease_seconds)
        self._round: Iterator[None] = iter(())
        self._batches: Iterator[None] | None = None  # goes on in the next round
        self._ended_at = 0.0  # the last round, in monotonic seconds

    def run(self, interval_seconds: float) -> bool:
        """Do a whole round, unless another worker did in this interval. Returns whether it did."""
        has_begun = self.begin(interval_seconds)
        while has_begun and not self.go_on(interval_seconds):
            pass
        return has_begun

    def begin(self, interval_seconds: float) -> bool:
        """Begin a round, unless another worker did in this interval. Raises RedisError."""
        lock = redis_keys.maintenance_lock(self._queue)
        lifetime_ms = max(1, int(interval_seconds * 900))
        with self._connection.pipeline(transaction=False) as pipeline:
            pipeline.time()
            pipeline.set(lock, self._worker, nx=True, px=lifetime_ms)
            pipeline.ttl(lock)
            (seconds, micros), is_ours, ttl_seconds = pipeline.execute()
        server_now = seconds + micros / 1e6
        is_trusted = self._clock.trusts(server_now)
        if not is_ours and ttl_seconds > lifetime_ms / 1000 + 1:
            # The server's clock was set back since the lock was taken.
            is_ours = self._connection.set(lock, self._worker, px=lifetime_ms)
        if not is_ours or not is_trusted:
            return False
        now = time.monotonic()
        if now - self._ended_at > 2 * interval_seconds:
            self._batches = None  # what it has read is old
        self._round = self._steps(server_now, now + lifetime_ms / 1000)
        return True

    def go_on(self, seconds: float) -> bool:
        """Work for so long, or one step; whether the round is over. Raises RedisError."""
        until = time.monotonic() + seconds
        for _ in self._round:
            if time.monotonic() >= until:
                return False
        self._ended_at = time.monotonic()
        return True

    def _steps(self, server_now: float, until: float) -> Iterator[None]:
        requeued, failed = self._moves.reap(
            self._queue, as_of=server_now, lease_seconds=self._lease_seconds
        )
        if requeued or failed:
            log.warning(
                "took back %d jobs of lost workers; %d more failed for good", requeued, failed
            )
        yield
        for kind in _REASONS:
            yield from self._heal(kind)
        self._drop_expired()
        # RQ's Queue knows the key of the set of its workers; the serializer is never used here.
        clean_worker_registry(
            Queue(self._queue, connection=self._connection, serializer=JSONSerializer)
        )
        yield
        batches, self._batches = self._batches or self._reconcile(), None
        while time.monotonic() < until:
            if next(batches, _OVER) is _OVER:
                return
            yield
        self._batches = batches

    def _reconcile(self) -> Iterator[None]:
        """Reconcile the queue's batches with Redis, a page of all batches in turn.

        Some lines of one open batch are checked as well. While other batches keep the queue full,
        nothing else shows that its jobs were deleted.
        """
        for _ in self._moves.copies(self._queue):
            yield
        ids: list[Any] = self._connection.zrevrange(
            redis_keys.BATCHES, self._batch_offset, self._batch_offset + PAGE - 1
        )
        self._batch_offset = self._batch_offset + PAGE if len(ids) == PAGE else 0
        is_open: list[BatchStatus] = []
        for start in range(0, len(ids), BATCHES_PAGE):
            page = [raw.decode() for raw in ids[start : start + BATCHES_PAGE]]
            for status in self._readable(page):
                if status.queue == self._queue:
                    with suppress(NotFoundError):
                        for _ in self._reconciler.steps(status):
                            yield
                    if status.is_submitted and not (status.is_done or status.is_forgotten):
                        is_open.append(status)
            yield
        self._audit(is_open)

    def _readable(self, batch_ids: Sequence[str]) -> list[BatchStatus]:
        """The batches that exist, without those that cannot be read."""
        try:
            return read_batches(self._connection, batch_ids)
        except WireError as fault:
            if len(batch_ids) == 1:
                log.warning("a batch is left out of the maintenance: %s", fault)
                return []
            return [found for one in batch_ids for found in self._readable([one])]

    def _audit(self, open_batches: Sequence[BatchStatus]) -> None:
        """Check some lines of the batch whose turn it is. Only files without blank lines are."""
        whole = [status for status in open_batches if status.total == status.last_line]
        status = next((s for s in whole if s.batch_id == self._audited), None)
        if status is None or self._audited_lines >= status.last_line:
            later = [s for s in whole if s.batch_id > self._audited]
            status = min(later or whole, key=lambda s: s.batch_id, default=None)
            self._audited, self._audited_lines = status.batch_id if status else "", 0
        if status is not None:
            first = self._audited_lines + 1
            lines = range(first, min(first + PAGE, status.last_line + 1))
            self._audited_lines = lines.stop - 1
            if lost := find_lost(self._connection, status, lines):
                num_lost = sum(settle_lost(self._connection, status, lost))
                log.warning("gave %d rows their error row: their jobs were deleted", num_lost)

    def _heal(self, kind: str) -> Iterator[None]:
        """Store an error for jobs that RQ's tools or ``reap`` failed or canceled.

        The newest page each time, and one older page in turn, so that no registry costs more.
        """
        registry = redis_keys.registry(kind, self._queue)
        yield from self._heal_page(kind, self._page(registry, 0))
        start = self._offsets[kind] + PAGE
        older = self._page(registry, start)
        yield from self._heal_page(kind, older)
        self._offsets[kind] = start if older else 0

    def _page(self, registry: str, start: int) -> list[str]:
        ids: list[Any] = self._connection.zrange(registry, start, start + PAGE - 1, desc=True)
        return [job_id.decode("utf-8", "replace") for job_id in ids]

    def _heal_page(self, kind: str, ids: list[str]) -> Iterator[None]:
        missing = self._without_result(ids)
        done = 0
        for page in self._data(missing):
            rows = [(job_id, _row(kind, blob)) for job_id, blob in page]
            verdicts = self._moves.settle(self._queue, "failed", rows) if rows else []
            done += sum(map(bool, verdicts))
            yield
        if done:
            log.warning("gave %d %s jobs without a result their error row", done, kind)

    def _data(self, ids: list[str]) -> Iterator[list[tuple[str, bytes | None]]]:
        """Each id with its job's data: pages of no more than ``ENOUGH_BYTES``, or of one."""
        pipeline = self._connection.pipeline(transaction=False)
        for job_id in ids:
            pipeline.hstrlen(redis_keys.job(job_id), "data")
        sizes = pipeline.execute() if ids else []
        waiting: list[str] = []
        num_bytes = 0
        for job_id, size in zip(ids, sizes, strict=True):
            if size > MAX_JOB_BYTES:
                yield [(job_id, None)]
                continue
            if waiting and num_bytes + size > ENOUGH_BYTES:
                yield self._fetch(waiting)
                waiting, num_bytes = [], 0
            waiting.append(job_id)
            num_bytes += size
        yield self._fetch(waiting)

    def _fetch(self, ids: list[str]) -> list[tuple[str, bytes | None]]:
        pipeline = self._connection.pipeline(transaction=False)
        for job_id in ids:
            pipeline.hget(redis_keys.job(job_id), "data")
        return list(zip(ids, pipeline.execute() if ids else [], strict=True))

    def _without_result(self, ids: list[str]) -> list[str]:
        parsed = [(job_id, redis_keys.parse_job_id(job_id)) for job_id in ids]
        ours = [(job_id, place) for job_id, place in parsed if place is not None]
        pipeline = self._connection.pipeline(transaction=False)
        for _, (batch_id, line) in ours:
            pipeline.hexists(redis_keys.results(batch_id), str(line))
        found = pipeline.execute() if ours else []
        return [job_id for (job_id, _), there in zip(ours, found, strict=True) if not there]

    def _drop_expired(self) -> None:
        """Drop entries of RQ's registries that have expired, by the server's clock."""
        now: Any = self._connection.time()
        pipeline = self._connection.pipeline(transaction=False)
        for kind in ("finished", "failed", "canceled"):
            pipeline.zremrangebyscore(redis_keys.registry(kind, self._queue), 0, int(now[0]))
        pipeline.execute()


class MaintenanceRounds:
    """A round goes over every queue once, unless another worker did that in this interval."""

    def __init__(self, queues: Sequence[Maintenance], interval_seconds: float) -> None:
        self._queues = tuple(queues)
        self._interval_seconds = interval_seconds
        self._left: list[Maintenance] = []  # queues of this round that have not begun
        self._now: Maintenance | None = None

    @property
    def is_on(self) -> bool:
        """Whether a round has begun and is not over."""
        return self._now is not None or bool(self._left)

    def go_on(self, seconds: float) -> bool:
        """Work for so long, or one step; whether the round is over. Raises RedisError."""
        if not self.is_on:
            self._left = list(self._queues)
        if self._now is None:
            following = self._left.pop(0)
            self._now = following if following.begin(self._interval_seconds) else None
        if self._now is not None and self._now.go_on(seconds):
            self._now = None
        return not self.is_on


def _row(kind: str, data: bytes | None) -> bytes:
    custom_id, endpoint = "", "chat"
    try:
        request = decode_job(data or b"")
        custom_id, endpoint = request.custom_id, request.endpoint
    except WireError:
        log.debug("a %s job's data cannot be read; its row has no custom_id", kind)
    result = Result(
        custom_id=custom_id,
        endpoint=endpoint,  # type: ignore[arg-type]
        outcome="failed",
        error=_REASONS[kind],
        created=int(time.time()),
    )
    return encode_result(result)
