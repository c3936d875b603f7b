"""Reads jobs and results in pages of limited size.

A row's data and its result may each have 64 MiB. A page holds as many rows as fit into
``ENOUGH_BYTES``, but at least one. The server measures and reads in one step, so this needs no more
round trips than plain reads.
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
        """The stored results of the first of these lines: as many as fit a page, at least one.

        None for a line without a result, b"" for a result that is larger than allowed.
        """
        args = [ENOUGH_BYTES, MAX_RESULT_BYTES, *map(str, lines)]
        found: list[bytes | None] = self._run("values", [redis_keys.results(batch_id)], args)
        return found

    def jobs(
        self, job_ids: Sequence[str], states: Sequence[bytes]
    ) -> Iterator[tuple[str, bytes | None, bytes | None]]:
        """(id, state, data) of each job. Data is read only for jobs in one of these states."""
        start = 0
        while start < len(job_ids):
            wanted = b",%b," % b",".join(states)
            args = [ENOUGH_BYTES, MAX_JOB_BYTES, wanted, *job_ids[start:]]
            found: list[Any] = self._run("jobs", [], args)
            yield from zip(job_ids[start:], found[::2], found[1::2], strict=False)
            start += len(found) // 2

    def unended(self, batch_id: str, lines: Sequence[int]) -> list[tuple[int, bytes | None]]:
        """(line, state of its job or None) of the lines without a result, read in one step."""
        args = [batch_id, *map(str, lines)]
        found: list[Any] = self._run("unended", [redis_keys.results(batch_id)], args)
        return [(int(line), s) for line, s in zip(found[::2], found[1::2], strict=True)]


def stored_results(
    connection: Redis, batch_id: str, lines: Sequence[int]
) -> Iterator[tuple[int, bytes | None]]:
    """(line, stored result or None) of each line, read page by page."""
    reader, start = Reader(connection), 0
    while start < len(lines):
        found = reader.results(batch_id, lines[start:])
        yield from zip(lines[start:], found, strict=False)
        start += len(found)
