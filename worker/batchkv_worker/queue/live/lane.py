"""The live lane of a worker: a thread that takes live rows and sends their answers.

It does not wait for the main thread, which may be in a long call. It hands rows to the engine, and
the engine's thread hands it all events of them. So a token is in Redis one round trip after its
step. The askers wake it by the channel of RQ's commands. An exchange each second renews leases, and
finds rows of which no message came.

A row is held in ``rows``, like the rows of batches, from the moment it is taken until Redis has its
end. While the server is away, pieces are kept in a list. They are numbered, so that a call whose
reply was lost is repeated without harm.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Protocol

from redis.exceptions import RedisError

from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.job import ErrorCode, Result, encode_result
from batchkv_producer.wire.live import Kind, LiveMoves, LiveWrite, is_refused
from batchkv_producer.wire.maker import Maker
from batchkv_producer.wire.transition_types import JobLease, JobResult, Pulled
from batchkv_worker.engine.thread import EngineThread
from batchkv_worker.events import Completed, Event, Piece, Rejected, Work

log = logging.getLogger("batchkv.worker")

TURN_SECONDS = 1.0  # between two looks without a message
AGAIN_SECONDS = 0.2  # between two tries while the server is away
REFUSED_SECONDS = 60.0  # between two tries if the server refuses
MOST_WRITES = 500  # in one call
END_SECONDS = 3.0  # how long the last pieces may take at the end


class Rows(Protocol):
    """Rows that are held: ``queue.in_flight.InFlight``."""

    model: str
    maker: Maker

    def __len__(self) -> int: ...

    @property
    def started(self) -> list[JobLease]: ...

    def admit(self, pulled: Pulled) -> Work | JobResult: ...

    def end(self, event: Completed | Rejected) -> JobResult | None: ...

    def expire(self, now: float) -> list[JobResult]: ...

    def drop(self, job_id: str) -> bool: ...


class LiveLane:
    """Owns the thread. Other threads call the public methods."""

    def __init__(
        self,
        moves: LiveMoves,
        queue: str,
        worker: str,
        engine: EngineThread,
        rows: Rows,
        most: Callable[[], int],
        abilities: Sequence[str],
    ) -> None:
        self._moves = moves
        self._queue = queue
        self._worker = worker
        self._engine = engine
        self._rows = rows
        self._most = most  # rows that may be held now; 0: none may begin
        self._abilities = tuple(abilities)
        self._leases: dict[str, JobLease] = {}
        self._numbers: dict[str, int] = {}  # of the last write of each row
        self._writes: list[LiveWrite] = []  # that Redis has not got yet
        self._inbox: SimpleQueue[list[Event] | None] = SimpleQueue()  # None: only wakes
        self._busy = threading.Lock()  # while rows are taken, and while none may be
        self._is_held = False
        self._is_closing = False
        self._turn_at = 0.0
        self._try_at = 0.0  # after an error
        self._was_refused = False
        self._thread = threading.Thread(target=self._run, name="batchkv-live", daemon=True)

    def start(self) -> None:
        """Begin to take rows, once ``most`` allows it."""
        self._engine.on_live = self._inbox.put
        self._thread.start()

    @property
    def num_rows(self) -> int:
        """Rows that are held, or whose ends Redis has not got."""
        return len(self._leases)

    def wake(self) -> None:
        """Look for rows now. From any thread."""
        self._turn_at = 0.0
        self._inbox.put(None)

    def hold(self) -> bool:
        """Take no more rows until ``serve``; False if there are any now. Never waits."""
        if self._is_held:
            return True
        if not self._busy.acquire(blocking=False):
            return False
        self._is_held = not self._leases
        self._busy.release()
        return self._is_held

    def serve(self, model: str) -> None:
        """Take rows of this model from now on. After ``hold``."""
        self._queue, self._rows.model = redis_keys.queue_name(model), model
        self._is_held = False
        self.wake()

    def close(self) -> None:
        """Give back the rows whose answers have not begun, and end the others with an error."""
        if self._thread.ident is None or self._is_closing:
            return
        self._is_closing = True
        self._inbox.put(None)
        self._thread.join(END_SECONDS)

    # -- the thread

    def _run(self) -> None:
        while not self._is_closing:
            self._note(self._wait())
            for result in self._rows.expire(time.monotonic()):
                self._engine.cancel(result.lease.job_id)
                self._end(result)
            self._exchange()
        for lease in list(self._leases.values()):
            self._engine.cancel(lease.job_id)
            self._add(lease, "b", self._stopped(lease))
        self._try_at, until = 0.0, time.monotonic() + END_SECONDS
        while self._writes and time.monotonic() < until:
            self._exchange(is_last=True)

    def _wait(self) -> list[Event]:
        """All events that have come, after a wait for the first until something is due."""
        now, events = time.monotonic(), list[Event]()
        at = self._try_at if self._writes else max(self._turn_at, self._try_at)
        try:
            found = self._inbox.get(at > now, max(0.001, min(at - now, TURN_SECONDS)))
            while True:
                events += found or ()
                found = self._inbox.get_nowait()
        except Empty:
            return events

    def _note(self, events: Iterable[Event]) -> None:
        """Note what the engine says. Pieces of one row that came together are one."""
        texts: dict[tuple[str, Kind], str] = {}
        for event in events:
            if isinstance(event, Piece):
                key: tuple[str, Kind] = (event.job_id, "t" if event.is_thought else "d")
                texts[key] = texts.get(key, "") + event.text
        for (job_id, kind), text in texts.items():
            if (lease := self._leases.get(job_id)) is not None:
                self._add(lease, kind, text.encode("utf-8", "replace"))
        for event in events:
            if isinstance(event, Completed | Rejected):
                result = self._rows.end(event)
                if result is not None:
                    self._end(result)

    def _end(self, result: JobResult) -> None:
        self._add(result.lease, "e", result.result)

    def _add(self, lease: JobLease, kind: Kind, payload: bytes) -> None:
        number = self._numbers[lease.job_id] = self._numbers.get(lease.job_id, 0) + 1
        self._writes.append(LiveWrite(lease, kind, number, payload))

    def _exchange(self, *, is_last: bool = False) -> None:
        if time.monotonic() < self._try_at:
            if is_last:
                time.sleep(0.05)
            return
        try:
            while self._writes:
                self._write()
            if not is_last and time.monotonic() >= self._turn_at:
                with self._busy:
                    self._turn()
        except RedisError as fault:
            self._fail(fault)

    def _fail(self, fault: RedisError) -> None:
        """Try again soon. A server that refuses is one of an older hub, most likely."""
        now = time.monotonic()
        is_refusal = is_refused(fault)
        self._try_at = now + (REFUSED_SECONDS if is_refusal else AGAIN_SECONDS)
        if is_refusal and not self._was_refused:
            log.info(
                "questions are answered by batches: the hub is of an older version (%s)", fault
            )
        self._was_refused = is_refusal

    def _write(self) -> None:
        group = self._writes[:MOST_WRITES]
        lost = self._moves.write(self._queue, group)
        del self._writes[: len(group)]
        for one in group:
            if one.kind in ("e", "b"):
                self._forget(one.lease.job_id)
        self._drop(lost)

    def _turn(self) -> None:
        """Renew leases, drop lost rows, take new ones."""
        self._turn_at = time.monotonic() + TURN_SECONDS
        room = 0 if self._is_held else max(0, self._most() - len(self._leases))
        self._rows.maker = self._engine.maker
        lost, taken = self._moves.turn(
            *(self._queue, self._worker, list(self._leases.values()), room),
            *(self._rows.maker.fingerprint, self._abilities),
        )
        self._drop(lost)
        works = []
        for row in taken:
            lease = row.pulled.lease
            self._leases[lease.job_id] = lease
            one = self._rows.admit(row.pulled)
            if isinstance(one, JobResult):
                self._end(one)
            else:
                works.append(replace(one, is_live=True, pieces=row.pieces))
        self._engine.add(works)
        if len(taken) and room > len(taken):
            self._turn_at = 0.0  # more may have come meanwhile

    def _drop(self, job_ids: Iterable[str]) -> None:
        """Rows that nobody waits for any more, or that another worker has."""
        for job_id in job_ids:
            if self._leases.get(job_id) is not None:
                self._engine.cancel(job_id)
                self._forget(job_id)
                self._writes = [one for one in self._writes if one.lease.job_id != job_id]

    def _forget(self, job_id: str) -> None:
        self._leases.pop(job_id, None)
        self._numbers.pop(job_id, None)
        self._rows.drop(job_id)
        if self._most() > len(self._leases):
            self._turn_at = 0.0  # its place is free

    def _stopped(self, lease: JobLease) -> bytes:
        error = (
            ErrorCode.ENGINE_ERROR,
            "the worker stopped in the middle of the answer: ask again",
        )
        return encode_result(Result(lease.job_id, "chat", "failed", self._rows.model, error=error))
