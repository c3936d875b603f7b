"""Results as lines of JSON, as rows end.

The finish order has a position for each row, and a client that was cut off goes on after the last
one that it has. A thread reads one page at a time; while nothing ends, no thread waits.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Literal

from redis import Redis
from starlette.concurrency import run_in_threadpool

from batchkv_producer.manage.reconcile import Reconciler
from batchkv_producer.monitor.status import check_there
from batchkv_producer.remote.rows import IN_FILE
from batchkv_producer.results.bounded import stored_results
from batchkv_producer.results.line_set import LineSet
from batchkv_producer.results.outfile import encoded
from batchkv_producer.results.output import output_line
from batchkv_producer.results.stored_rows import (
    NO_POSITION,
    StoredRow,
    in_finish_order,
    in_input_order,
)
from batchkv_producer.wire.job import decode_result, encode_result
from batchkv_producer.wire.redis_keys import job_id

PIECE_BYTES = 2**18
PIECE_ROWS = 200
QUIET_SECONDS = 10.0  # after so long without a row, a blank line shows that the gateway lives
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 1.0

Form = Literal["out", "stored"]


@dataclass(frozen=True, slots=True)
class AskedRows:
    """Which rows a client asks for. ``limit`` 0 is all.

    ``after`` rows of the finish order, or lines of the input, are left out. ``form``: ``out`` is
    that of OUT, ``stored`` that of Redis, in base64.
    """

    batch_id: str
    order: Literal["finish", "input"] = "finish"
    after: int = 0
    limit: int = 0
    outcome: str = ""
    form: Form = "out"
    is_followed: bool = False


class RowStream:
    """The answer to one request for results."""

    def __init__(self, connection: Redis, asked: AskedRows) -> None:
        self._connection, self._asked = connection, asked
        self._reconciler = Reconciler(connection)
        self._seen = LineSet()
        self._position, self._num_sent = asked.after, 0
        self._rows = self._begin()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Whole lines, in pieces. It ends when the rows do, or with ``follow`` when the batch is
        done."""
        quiet, pause = 0.0, FIRST_PAUSE_SECONDS
        while True:
            piece, is_over = await run_in_threadpool(self._next)
            if piece:
                yield piece
                quiet, pause = 0.0, FIRST_PAUSE_SECONDS
            if is_over:
                return
            if not piece:
                await asyncio.sleep(pause)
                quiet, pause = quiet + pause, min(1.5 * pause, LONGEST_PAUSE_SECONDS)
            if quiet >= QUIET_SECONDS:
                yield b"\n"
                quiet = 0.0

    def _begin(self) -> Iterator[StoredRow]:
        """The rows that have ended by now."""
        asked = self._asked
        if asked.order == "input":
            return in_input_order(self._connection, asked.batch_id, after=asked.after)
        return in_finish_order(self._connection, asked.batch_id, after=self._position)

    def _next(self) -> tuple[bytes, bool]:
        """The next lines, and whether they are the last."""
        asked = self._asked
        is_done = not asked.is_followed or self._is_done()
        found, num_read = bytearray(), 0
        for row in islice(self._rows, PIECE_ROWS):
            num_read += 1
            self._position = max(self._position, row.position + 1)
            if (asked.is_followed and not self._seen.add(row.line)) or not self._is_wanted(row):
                continue
            found += line_of(row, asked.form)
            self._num_sent += 1
            if self._num_sent == asked.limit:
                return bytes(found), True
            if len(found) >= PIECE_BYTES:
                return bytes(found), False
        if num_read == PIECE_ROWS:
            return bytes(found), False
        if is_done:
            check_there(self._connection, asked.batch_id)
            return bytes(found), True
        self._rows = self._begin()
        return bytes(found), False

    def _is_done(self) -> bool:
        return self._reconciler.reconcile_id(self._asked.batch_id).is_done

    def _is_wanted(self, row: StoredRow) -> bool:
        return self._asked.outcome in ("", row.result.outcome)


def lines_of(connection: Redis, batch_id: str, lines: Sequence[int], form: Form) -> bytes:
    """The results of these lines of the input, where there are any."""
    found = bytearray()
    for line, value in stored_results(connection, batch_id, lines):
        if value is not None:
            row = StoredRow(job_id(batch_id, line), line, NO_POSITION, decode_result(value))
            found += line_of(row, form)
    return bytes(found)


def pieces_of(
    read: Callable[[], Iterator[StoredRow]], asked: AskedRows, lines: Sequence[int] | None
) -> Iterator[bytes]:
    """The answer for rows that lie in files, in the order of the input: whole lines, in pieces.

    ``lines``: these alone. A file that cannot be opened raises its error here, not later.
    """
    rows, only = read(), None if lines is None else {*lines}
    first = next(rows, None)

    def is_wanted(row: StoredRow) -> bool:
        number = row.line if asked.order == "input" else row.position + 1
        is_after = only is not None or number > asked.after
        return is_after and (only is None or row.line in only)

    def pieces() -> Iterator[bytes]:
        every = rows if first is None else chain((first,), rows)
        right = (row for row in every if asked.outcome in ("", row.result.outcome))
        wanted = islice(filter(is_wanted, right), asked.limit or None)
        while page := b"".join(in_file(row, asked.form) for row in islice(wanted, PIECE_ROWS)):
            yield page

    return pieces()


def in_file(row: StoredRow, form: Form) -> bytes:
    """``line_of`` a row of a file. It says so: positions in files are others than in the queue."""
    return IN_FILE + line_of(row, form)[1:]


def line_of(row: StoredRow, form: Form) -> bytes:
    """One line: the row's line and position, and its outcome, before the fields of OUT."""
    head = f'{{"line": {row.line}, "position": {row.position}, "outcome": "{row.result.outcome}", '
    if form == "stored":
        stored = base64.b64encode(encode_result(row.result)).decode("ascii")
        return f"{head}{json.dumps('stored')}: {json.dumps(stored)}}}\n".encode("ascii")
    return head.encode("ascii") + encoded(output_line(row.job_id, row.result))[1:]
