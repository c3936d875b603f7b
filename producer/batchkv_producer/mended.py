"""``batchkv run`` with a mended file: its OUT names the batch whose answers are kept.

OUT holds the rows of the file as it was. They go to a file beside it, and OUT gets the rows of
the mended file, most of them with the answers that they had.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from redis import Redis

from batchkv_producer import redis_keys
from batchkv_producer.aside import set_aside
from batchkv_producer.beginning import put_aside
from batchkv_producer.keeping import Earlier
from batchkv_producer.outfile import errors_path
from batchkv_producer.status import BatchStatus
from batchkv_producer.submission import Submitted
from batchkv_producer.target import STDOUT

MAX_LINE_BYTES = 2**26


def earlier_of(connection: Redis, out: Path) -> Earlier | None:
    """The batch whose results OUT begins with, if the server has it."""
    for part in (out, errors_path(out)) if out != STDOUT else ():
        found = _batch_of(part)
        if found and connection.exists(redis_keys.batch(found)):
            return Earlier(found)
    return None


def make_room(
    earlier: Earlier | None,
    status: BatchStatus,
    submitted: Submitted,
    out: Path,
    note: Callable[[str], None],
) -> None:
    """Make room in OUT for the rows of a mended file, or of another generation; tell of it."""
    if earlier is None or not earlier.num_alike:
        put_aside(status, submitted, out, note)
        return
    note(earlier.told(status.kept))
    moved = set_aside(out)
    note(f"{out} held the results of batch {earlier.batch_id}: they are in {moved} now")


def _batch_of(part: Path) -> str:
    try:
        with part.open("rb") as stream:
            row = json.loads(stream.readline(MAX_LINE_BYTES))
    except (OSError, ValueError, RecursionError):
        return ""
    parsed = redis_keys.parse_job_id(str(row.get("id"))) if isinstance(row, dict) else None
    return parsed[0] if parsed else ""
