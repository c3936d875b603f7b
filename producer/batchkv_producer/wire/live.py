"""The moves of live rows: rows that somebody waits for. Each is one script in ``lua/``.

A live row has lists of its own, so workers of older versions do not see it. ``redis_keys`` has its
keys and its states. All times are the server's.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from redis.exceptions import NoPermissionError, RedisError

from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.scripts import Scripts
from batchkv_producer.wire.transition_types import JobLease, Pulled

ASKER_LEASE_SECONDS = 30  # after the last sign of life of the asker, its rows are canceled
WORKER_LEASE_SECONDS = 10  # after the last sign of life of the worker, its rows are lost
MAX_WAITING = 1000  # live rows of one queue

Asked = Literal["ok", "loading", "away", "nobody", "full"]
Kept = Literal["kept", "gone", "lost", "nobody"]
Kind = Literal["d", "t", "e", "b"]  # a piece of the text or the thought, the end, given back
# What an asker wants before the end: nothing, the text, or the thought, too. Rows of older askers
# have no such field: "text". Older workers always send the text.
Pieces = Literal["none", "text", "all"]


@dataclass(frozen=True, slots=True)
class LiveRow:
    """A row to ask. ``fingerprint`` of the model's files; "" for any. ``needs``: abilities."""

    row_id: str
    queue: str
    data: bytes
    needs: tuple[str, ...] = ()
    fingerprint: str = ""
    timeout_seconds: int = 3600
    pieces: Pieces = "text"


@dataclass(frozen=True, slots=True)
class TakenRow:
    """A row that a worker has taken, and which pieces its asker wants."""

    pulled: Pulled
    pieces: Pieces


@dataclass(frozen=True, slots=True)
class LiveWrite:
    """A piece of an answer, its end, or a row given back. ``number`` counts from 1 for each row."""

    lease: JobLease
    kind: Kind
    number: int
    payload: bytes


def is_refused(fault: RedisError) -> bool:
    """Whether the user has no right to the keys of live rows: the hub is of an older version."""
    text = str(fault)
    return isinstance(fault, NoPermissionError) or text.startswith(("NOPERM", "ACL failure"))


class LiveMoves(Scripts):
    """The moves over one connection, which must return bytes."""

    def ask(
        self, rows: Sequence[LiveRow], asker: str, max_waiting: int = MAX_WAITING
    ) -> list[Asked]:
        """Queue rows, each unless nobody can answer it now. Only with "ok" it was written."""
        keys: list[str] = []
        args: list[Any] = [asker, ASKER_LEASE_SECONDS, max_waiting]
        for row in rows:
            keys += (redis_keys.live(row.queue), redis_keys.live_row(row.row_id))
            args += (row.row_id, row.queue, row.data, " ".join(row.needs), row.fingerprint)
            args += (row.timeout_seconds, row.pieces)
        return [answer.decode() for answer in self._run("live_ask", keys, args)]

    def keep(self, asker: str, row_ids: Sequence[str]) -> list[Kept]:
        """The asker still waits for these rows. Says of each what has become of it."""
        keys = [redis_keys.live_stream(asker)]
        answers = self._run("live_keep", keys, [ASKER_LEASE_SECONDS, *row_ids])
        return [answer.decode() for answer in answers]

    def cancel(self, row_ids: Iterable[str]) -> int:
        """Nobody waits for these rows any more. Returns how many were there."""
        return int(self._run("live_cancel", [], list(row_ids)))

    def turn(
        self,
        queue: str,
        worker: str,
        held: Sequence[JobLease],
        count: int,
        fingerprint: str,
        abilities: Sequence[str],
    ) -> tuple[list[str], list[TakenRow]]:
        """Renew leases, and take up to ``count`` rows. Returns (ids of lost rows, rows taken)."""
        keys = [redis_keys.live(queue), redis_keys.worker(worker), redis_keys.live_seen(queue)]
        args: list[Any] = [worker, WORKER_LEASE_SECONDS, count, secrets.token_hex(8), fingerprint]
        args += [" ".join(abilities), len(held)]
        for lease in held:
            args += (lease.job_id, lease.execution)
        lost, taken = self._run("live_turn", keys, args)
        rows = [
            TakenRow(
                Pulled(JobLease(row.decode(), execution.decode()), data, 0, int(timeout), rank=0),
                pieces.decode(),
            )
            for row, execution, data, timeout, pieces in taken
        ]
        return [row.decode() for row in lost], rows

    def write(self, queue: str, writes: Sequence[LiveWrite]) -> list[str]:
        """Send pieces and ends to the askers. Returns the ids of rows that are not held any more.

        The call may be repeated: a number of a row that was written is skipped.
        """
        args: list[Any] = []
        for one in writes:
            args += (one.lease.job_id, one.lease.execution, one.kind, one.number, one.payload)
        return [row.decode() for row in self._run("live_write", [redis_keys.live(queue)], args)]
