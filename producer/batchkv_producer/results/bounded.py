"""Reading what may be large: sizes are asked for first, and what is enough is read at once.

A row's data, and its result, may have 64 MiB. A page of rows is as many as ``ENOUGH_BYTES`` hold,
or one; the server measures and reads in one step, which costs no round trip more than reading.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from redis import Redis

from batchkv_producer.wire import redis_keys
from batchkv_producer.wire.job import MAX_JOB_BYTES, MAX_RESULT_BYTES
from batchkv_producer.wire.scripts import Scripts

ENOUGH_BYTES = 16 * 2**20


class Reader(Scripts):
    """Bounded reads of one server."""

    def results(self, batch_id: str, lines: Sequence[int]) -> list[bytes | None]:
        """Stored results of the first of these lines: fewer than were asked for, but one at least.

        None where there is none, nothing (b"") for one that is larger than a result may be.
        """
        args = [ENOUGH_BYTES, MAX_RESULT_BYTES, *map(str, lines)]
        found: list[bytes | None] = self._run("values", [redis_keys.results(batch_id)], args)
        return found

    def jobs(
        self, job_ids: Sequence[str], states: Sequence[bytes]
    ) -> Iterator[tuple[str, bytes | None, bytes | None]]:
        """(id, state, data) of each job; data only of those in one of these states."""
        start = 0
        while start < len(job_ids):
            wanted = b",%b," % b",".join(states)
            args = [ENOUGH_BYTES, MAX_JOB_BYTES, wanted, *job_ids[start:]]
            found: list[Any] = self._run("jobs", [], args)
            yield from zip(job_ids[start:], found[::2], found[1::2], strict=False)
            start += len(found) // 2

    def unended(self, batch_id: str, lines: Sequence[int]) -> list[tuple[int, bytes | None]]:
        """(line, state of its job or None) of the lines that have no result, read in one step."""
        args = [batch_id, *map(str, lines)]
        found: list[Any] = self._run("unended", [redis_keys.results(batch_id)], args)
        return [(int(line), s) for line, s in zip(found[::2], found[1::2], strict=True)]


def stored_results(
    connection: Redis, batch_id: str, lines: Sequence[int]
) -> Iterator[tuple[int, bytes | None]]:
    """(line, stored result or None) of each line, read a page at a time."""
    reader, start = Reader(connection), 0
    while start < len(lines):
        found = reader.results(batch_id, lines[start:])
        yield from zip(lines[start:], found, strict=False)
        start += len(found)
