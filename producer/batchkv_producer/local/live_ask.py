"""A question by the live lane: its answer comes piece by piece, and the server keeps nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from redis import Redis
from redis.exceptions import ResponseError

from batchkv_producer.live import Answer, Lane, LaneRefusedError, LostAnswerError
from batchkv_producer.monitor.workers import WorkerInfo, serving_workers
from batchkv_producer.progress import Reporter, Snapshot
from batchkv_producer.results.stored_rows import StoredRow
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.job import Request
from batchkv_producer.wire.live import is_refused

OLD_SECONDS = 1.0  # after which a worker that has signed on answers live rows, or never will
LOOK_SECONDS = 1.0  # between two looks whether the server is there

OnPiece = Callable[[str], object]


class NoLaneError(Exception):
    """The workers, or the server's rights, are of a version without live rows."""


class DesertedError(Exception):
    """Whoever served the model is gone, and nothing of the answer has come."""


class LiveQuestion:
    """One question. ``look`` is called until it returns the row.

    ``is_served``: whether one of these workers serves the model; not asked while it is None.
    """

    def __init__(
        self,
        connection: Redis,
        request: Request,
        served: str,
        fingerprint: str,
        timeout_seconds: int,
        on_piece: OnPiece,
        reporter: Reporter,
        is_served: Callable[[Sequence[WorkerInfo]], bool] | None = None,
    ) -> None:
        self._is_served = is_served
        self._connection = connection
        self._lane = Lane(connection)
        self._request = request
        self._served = served
        self._fingerprint = fingerprint
        self._timeout_seconds = timeout_seconds
        self._on_piece = on_piece
        self._reporter = reporter
        self._has_begun = False  # a piece was given
        self._answer: Answer | None = None
        self._old_since = 0.0
        self._look_at = 0.0

    def look(self, seconds: float) -> StoredRow | None:
        """Wait so long for more of the answer. Returns the row at its end.

        Raises NoLaneError if nobody answers live rows, LostAnswerError if the answer broke off, and
        DesertedError.
        """
        if not self._has_begun and time.monotonic() >= self._look_at:
            self._report()
        if self._answer is None and not self._ask():
            time.sleep(seconds)
            return None
        answer = self._answer
        assert answer is not None
        try:
            piece = answer.next(seconds)
        except LostAnswerError:
            if self._has_begun:
                raise
            self._answer = None  # nothing was printed: it is asked again
            return None
        if piece:
            self._has_begun = True
            self._on_piece(piece)
        elif piece is None and answer.result is not None:
            return StoredRow(answer.row_id, 1, -1, answer.result)
        elif self._has_begun and time.monotonic() >= self._look_at:
            self._connection.ping()  # raises in an outage, which the caller waits for
            self._look_at = time.monotonic() + LOOK_SECONDS
        return None

    def _report(self) -> None:
        """Show what a worker does that has not begun to answer. Raises RedisError in an outage."""
        workers = serving_workers(self._connection, redis_keys.queue_name(self._served))
        if self._is_served is not None and not self._is_served(workers):
            raise DesertedError
        doing = next((worker.doing for worker in workers if worker.doing), "")
        self._reporter.update(Snapshot(total=1, delay=doing))
        self._look_at = time.monotonic() + LOOK_SECONDS

    def close(self) -> None:
        """Nobody waits for the answer any more."""
        self._lane.close()

    def _ask(self) -> bool:
        try:
            self._answer = self._lane.ask(
                self._request,
                self._served,
                fingerprint=self._fingerprint,
                timeout_seconds=self._timeout_seconds,
            )
        except LaneRefusedError as refusal:
            if refusal.why == "nobody":
                self._check_old()
            return False
        except ResponseError as fault:
            if is_refused(fault):
                raise NoLaneError from fault
            raise
        return True

    def _check_old(self) -> None:
        """Raise NoLaneError if a worker has signed on and does not answer live rows."""
        workers = serving_workers(self._connection, redis_keys.queue_name(self._served))
        now = time.monotonic()
        if not workers:
            self._old_since = 0.0
        elif not self._old_since:
            self._old_since = now
        elif now - self._old_since >= OLD_SECONDS:
            raise NoLaneError
