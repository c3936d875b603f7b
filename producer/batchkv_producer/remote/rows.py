"""Reads the results of a batch from a gateway, and goes on after a cut."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator
from itertools import islice
from typing import Literal

from batchkv_producer.errors import AwayError, WireError
from batchkv_producer.monitor.status import check_id
from batchkv_producer.remote.decoding import part
from batchkv_producer.remote.transport import Transport
from batchkv_producer.results.line_set import LineSet
from batchkv_producer.results.stored_rows import StoredRow
from batchkv_producer.retry import read_with_retry
from batchkv_producer.wire.job import decode_result
from batchkv_producer.wire.redis_keys import job_id

IN_FILE = b'{"in_file": true, '  # with which lines of rows begin that have left the queue
_OPENAI_ID = re.compile(r"batch_[0-9a-f]{32}")


class _MovedError(Exception):
    """The rows have left the queue meanwhile. Files have them in another order."""


class RowReader:
    """The rows of one request for results, and of those that go on after a cut."""

    def __init__(
        self,
        transport: Transport,
        batch_id: str,
        order: Literal["finish", "input"],
        after: int,
        *,
        is_followed: bool,
    ) -> None:
        self._transport, self._batch_id = transport, batch_id
        self._order, self._after, self._is_followed = order, after, is_followed
        self._seen = LineSet()
        self._was_in_queue = False  # rows were read from there

    def each(self) -> Iterator[StoredRow]:
        """All of them. AwayError if the gateway is away for too long."""
        while True:
            lines = read_with_retry(self._begin)
            try:
                yield from self._rows(lines)
                return
            except (AwayError, _MovedError):
                pass  # the next request goes on behind the last row, or begins anew

    def _rows(self, lines: Iterator[bytes]) -> Iterator[StoredRow]:
        for line in lines:
            row, is_in_file = row_of(self._batch_id, line), line.startswith(IN_FILE)
            if is_in_file and self._was_in_queue and self._order == "finish":
                self._after, self._was_in_queue = 0, False
                raise _MovedError
            self._was_in_queue |= not is_in_file
            self._after = row.line if self._order == "input" else row.position + 1
            if self._seen.add(row.line):
                yield row

    def _begin(self) -> Iterator[bytes]:
        """The lines from here on. The answer has begun when this returns."""
        lines = self._transport.lines(
            path_of(self._batch_id, "results"),
            form="stored",
            order=self._order,
            after=self._after,
            follow=int(self._is_followed),
        )
        return _begun(lines)


def _begun(lines: Iterator[bytes]) -> Iterator[bytes]:
    first = list(islice(lines, 1))
    return _chained(first, lines)


def _chained(first: list[bytes], lines: Iterator[bytes]) -> Iterator[bytes]:
    yield from first
    yield from lines


def path_of(batch_id: str, more: str = "") -> str:
    """The path of a batch. Raises NotFoundError for a text that is no id."""
    if not is_openai_id(batch_id):
        check_id(batch_id)
    return f"batches/{batch_id}{'/' if more else ''}{more}"


def is_openai_id(text: str) -> bool:
    """Whether a text looks like a batch's id of OpenAI's API."""
    return _OPENAI_ID.fullmatch(text) is not None


def row_of(batch_id: str, line: bytes) -> StoredRow:
    """The row of a line of the form ``stored``. Raises WireError."""
    try:
        found = json.loads(line)
        stored = base64.b64decode(part(found, "stored", str), validate=True)
    except (ValueError, RecursionError, binascii.Error) as fault:
        raise WireError("a line of the gateway's results cannot be read") from fault
    number, position = part(found, "line", int), part(found, "position", int)
    return StoredRow(job_id(batch_id, number), number, position, decode_result(stored))
