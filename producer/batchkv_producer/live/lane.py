"""The live lane of one process: asks rows, and reads their answers with one thread and connection.

Any number of threads may ask at once. The answers of all of them come by one stream in Redis, which
a thread reads while any answer is open. It also says every few seconds that the rows are still
wanted. If this process is killed, the rows are canceled ``ASKER_LEASE_SECONDS`` later.

While the server is away, nothing is lost: the thread reads on where it was. If the server does not
answer for as long as the rows' lease, the answers end with ``LostAnswerError``.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from batchkv_producer.errors import BatchkvError, WireError
from batchkv_producer.live.answer import Answer, LostAnswerError, Piece
from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.job import Request, decode_result, encode_job
from batchkv_producer.wire.live import (
    ASKER_LEASE_SECONDS,
    MAX_WAITING,
    Asked,
    LiveMoves,
    LiveRow,
    Pieces,
)
from batchkv_producer.wire.maker import needs_of

KEEP_SECONDS = 3.0  # between two signs of life
BLOCK_MS = 500  # of one wait for the stream on the server
READ_ENTRIES = 500  # of the stream, at once
GONE = "its worker is gone, or the server has lost the question: ask again"
AGAIN_SECONDS = 0.2  # between two tries while the server is away

_REFUSALS = {
    "nobody": "no worker answers {model}: start one with `batchkv worker -m {model}`",
    "away": "the workers of {model} are asleep, paused, drained or away: try again in a minute",
    "loading": "the worker of {model} is loading it: try again in a few seconds",
    "full": "too many questions wait for {model}: try again in a few seconds",
}


class LaneRefusedError(BatchkvError):
    """A row was not queued. ``why``: "nobody", "away", "loading" or "full"."""

    def __init__(self, why: Asked, model: str) -> None:
        super().__init__(_REFUSALS[why].format(model=model))
        self.why = why


@dataclass(frozen=True, slots=True)
class Question:
    """A row to ask (``Lane.ask``). ``on_given``: of its ``Answer``."""

    request: Request
    model: str
    fingerprint: str = ""
    timeout_seconds: int = 3600
    pieces: Pieces = "text"
    on_given: Callable[[], object] = bool


class Lane:
    """Asks live rows over one connection pool, whose replies must be bytes. Thread-safe."""

    def __init__(self, connection: Redis, max_waiting: int = MAX_WAITING) -> None:
        self._connection = connection
        self._moves = LiveMoves(connection)
        self._max_waiting = max_waiting
        self._asker = secrets.token_hex(8)
        self._open: dict[str, Answer] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None  # runs while any answer is open
        self._last_id: Any = "0-0"  # of the stream's entries that were read
        self._is_closed = False

    def ask(
        self, request: Request, model: str, *, fingerprint: str = "", timeout_seconds: int = 3600
    ) -> Answer:
        """Ask a row. ``fingerprint``: only workers with these files of the model; "" for any.

        ``model`` is as workers serve it (``MODEL@NAME`` with an adapter). Raises LaneRefusedError
        if no worker can answer now or too many rows wait, RedisError if the server is away.
        """
        question = Question(request, model, fingerprint, timeout_seconds)
        (answer,) = self.ask_all([question])
        if isinstance(answer, LaneRefusedError):
            raise answer
        return answer

    def ask_all(self, questions: Sequence[Question]) -> list[Answer | LaneRefusedError]:
        """Ask several rows in one call of the server. Raises RedisError if it is away."""
        answers: list[Answer] = []
        rows: list[LiveRow] = []
        for one in questions:
            row_id, queue = f"live-{secrets.token_hex(8)}", redis_keys.queue_name(one.model)
            answers.append(Answer(row_id, queue, self._cancel, one.on_given))
            rows.append(
                LiveRow(
                    *(row_id, queue, encode_job(one.request), needs_of(one.request)),
                    fingerprint=one.fingerprint,
                    timeout_seconds=one.timeout_seconds,
                    pieces=one.pieces,
                )
            )
        with self._lock:  # before they are asked: pieces may come at once
            assert not self._is_closed, "the lane is closed"
            self._open.update({answer.row_id: answer for answer in answers})
        asked: list[Asked] = []
        try:
            asked = self._moves.ask(rows, self._asker, self._max_waiting)
        finally:
            with self._lock:
                for answer, how in zip_longest(answers, asked):
                    if how != "ok":
                        del self._open[answer.row_id]
        for answer in answers:
            answer.is_asked = True
        self._start()
        return [
            answer if how == "ok" else LaneRefusedError(how, one.model)
            for answer, how, one in zip(answers, asked, questions, strict=True)
        ]

    def close(self) -> None:
        """Cancel all answers that are open, and end the thread."""
        with self._lock:
            self._is_closed = True
            open_rows, thread = list(self._open.values()), self._thread
        for answer in open_rows:
            self._cancel(answer)
        if thread is not None:
            thread.join(2 * BLOCK_MS / 1000)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._read, name="batchkv-lane", daemon=True)
                self._thread.start()

    def _cancel(self, answer: Answer) -> None:
        with self._lock:
            was_open = self._open.pop(answer.row_id, None) is not None
        if was_open:
            answer.give(LostAnswerError("the question was canceled"))
            with suppress(RedisError):  # else its lease ends it
                self._moves.cancel([answer.row_id])

    # -- the thread

    def _read(self) -> None:
        try:
            self._read_on()
        finally:  # after an error, nobody waits for ever
            with self._lock:
                is_broken = self._thread is threading.current_thread()
                self._thread = None if is_broken else self._thread
            if is_broken:
                self._lose(set(self._open), "reading the answers failed: ask again")

    def _read_on(self) -> None:
        keep_at, alive_at, gone = 0.0, time.monotonic(), set[str]()
        while self._goes_on():
            try:
                if time.monotonic() >= keep_at:
                    gone = self._keep()
                    keep_at = time.monotonic() + KEEP_SECONDS
                num_read = self._read_some(is_waiting=not gone)
                if gone and not num_read:  # all that was written for them has been read
                    self._lose(gone, GONE)
                    gone = set()
                alive_at = time.monotonic()
            except RedisError as fault:
                if time.monotonic() - alive_at > ASKER_LEASE_SECONDS:
                    self._lose(set(self._open), f"the server does not answer ({fault}): ask again")
                keep_at = 0.0
                time.sleep(AGAIN_SECONDS)

    def _goes_on(self) -> bool:
        """Whether any answer is open. If not, the thread ends, and the next row starts another."""
        with self._lock:
            if self._open:
                return True
            self._thread = None
            return False

    def _keep(self) -> set[str]:
        """Say that the rows are wanted. Returns those that have ended, as far as the server knows.

        What was read of the stream is deleted there.
        """
        with self._lock:
            row_ids = [row_id for row_id, answer in self._open.items() if answer.is_asked]
        kept = dict(zip(row_ids, self._moves.keep(self._asker, row_ids), strict=True))
        stream = redis_keys.live_stream(self._asker)
        self._connection.xtrim(stream, minid=self._last_id, approximate=False)
        lost = {row_id for row_id, state in kept.items() if state == "lost"}
        self._lose(lost, "its worker ended in the middle of the answer: ask again")
        nobody = {row_id for row_id, state in kept.items() if state == "nobody"}
        self._lose(nobody, "no worker of the model is left: start one, and ask again")
        return {row_id for row_id, state in kept.items() if state == "gone"}

    def _read_some(self, *, is_waiting: bool) -> int:
        """Give the answers what the stream has. Returns the number of entries."""
        stream = redis_keys.live_stream(self._asker)
        reply: Any = self._connection.xread(
            {stream: self._last_id}, count=READ_ENTRIES, block=BLOCK_MS if is_waiting else None
        )
        entries = _entries(reply)
        for entry_id, fields in entries:
            self._last_id = entry_id
            self._give(fields)
        return len(entries)

    def _give(self, fields: dict[bytes, bytes]) -> None:
        row_id, payload = fields.get(b"r", b"").decode("utf-8", "replace"), fields.get(b"p", b"")
        with self._lock:
            kind = fields.get(b"k")
            is_end = kind == b"e"
            answer = self._open.pop(row_id, None) if is_end else self._open.get(row_id)
        if answer is None:
            return  # canceled meanwhile
        if not is_end:
            answer.give(Piece(payload.decode("utf-8", "replace"), kind == b"t"))
            return
        try:
            answer.give(decode_result(payload))
        except WireError as fault:
            answer.give(LostAnswerError(f"the answer cannot be read: {fault}"))

    def _lose(self, row_ids: set[str], why: str) -> None:
        for row_id in row_ids:
            with self._lock:
                answer = self._open.pop(row_id, None)
            if answer is not None:
                answer.give(LostAnswerError(why))


def _entries(reply: Any) -> list[tuple[Any, dict[bytes, bytes]]]:
    """The entries of an answer to XREAD of one stream, in either version of the protocol."""
    if not reply:
        return []
    streams = reply.items() if isinstance(reply, dict) else reply
    found: list[tuple[Any, dict[bytes, bytes]]] = []
    for _, entries in streams:
        nested = entries[0] if entries and isinstance(entries[0], list) else entries
        found += nested
    return found
