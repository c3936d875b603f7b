"""Finishing a submit that an older version began, which refused other rows of the file.

Wrong rows are queued first. So a row that was wrong then and is good now moves all rows after it,
and the next chunk would leave some rows out. A batch stores the version of the rules by which its
rows were read; older versions stored none. Before such a batch is finished, its first chunks are
compared with the server.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

from redis import Redis

from batchkv_producer.errors import BatchkvError
from batchkv_producer.order.chunk import Chunk
from batchkv_producer.wire import redis_keys

RULES_VERSION = 1  # the first that was stored: of the table of fields
_PAGE_ROWS = 500


def check_chunks(connection: Redis, batch_id: str, chunks: Iterable[Chunk], end: int) -> None:
    """Raise BatchkvError if the server lacks a row of the first ``end`` chunks.

    A batch of this version is not checked.
    """
    if connection.hget(redis_keys.batch(batch_id), "rules"):
        return
    for chunk in takewhile(lambda chunk: chunk.number < end, chunks):
        lines = [line for line, *_ in chunk.jobs] + [row.line for row in chunk.bad_rows]
        for first in range(0, len(lines), _PAGE_ROWS):
            if not _are_there(connection, batch_id, lines[first : first + _PAGE_ROWS]):
                raise BatchkvError(
                    f"batch {batch_id} was begun by a version of batchkv that refused other rows "
                    "of this file; finish the submit with that version, or begin anew with --fresh"
                )


def _are_there(connection: Redis, batch_id: str, lines: Sequence[int]) -> bool:
    """Whether each of these rows has a job or a result."""
    with connection.pipeline(transaction=False) as pipeline:
        for line in lines:
            pipeline.exists(redis_keys.job(redis_keys.job_id(batch_id, line)))
            pipeline.hexists(redis_keys.results(batch_id), str(line))
        found = pipeline.execute()
    return all(job or result for job, result in zip(found[::2], found[1::2], strict=True))
