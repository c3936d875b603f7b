"""``batchkv run`` with a mended file: OUT names the earlier batch whose answers are kept.

OUT holds the results of the file before it was mended. It is moved to OUT.1.old.jsonl. The new OUT
gets the results of the mended file, most of them copied from the earlier batch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from batchkv_producer.monitor.status import BatchStatus
from batchkv_producer.results.aside import first_row, holds_other, newest_aside, set_aside
from batchkv_producer.results.outfile import errors_path
from batchkv_producer.results.target import STDOUT
from batchkv_producer.submit.kept_answers import EarlierBatch
from batchkv_producer.submit.submission import Submitted
from batchkv_producer.wire import redis_keys


def earlier_of(is_there: Callable[[str], bool], out: Path) -> EarlierBatch | None:
    """The batch whose results are in OUT, if ``is_there`` says that the server has it.

    A run with a mended file moves OUT aside. If it is killed before its first result, there is no
    OUT. Then the file that was moved aside names the batch.
    """
    if out == STDOUT:
        return None
    parts = _parts(out)
    if not any(part.exists() for part in parts) and (old := newest_aside(out)):
        parts = _parts(old)
    for part in parts:
        parsed = redis_keys.parse_job_id(str(first_row(part).get("id")))
        if parsed and is_there(parsed[0]):
            return EarlierBatch(parsed[0])
    return None


def batch_in(out: Path) -> str:
    """The batch whose results are in OUT or in its errors file; "" if there are none."""
    parsed = (redis_keys.parse_job_id(str(first_row(part).get("id"))) for part in _parts(out))
    return next((found[0] for found in parsed if found), "")


def _parts(out: Path) -> list[Path]:
    return [out, errors_path(out)]


def make_room(
    earlier: EarlierBatch | None,
    status: BatchStatus,
    submitted: Submitted,
    out: Path,
    note: Callable[[str], None],
) -> None:
    """Move OUT aside for the rows of a mended file or of another generation, and print notes."""
    if earlier is None or not earlier.num_alike:
        _put_aside(status, submitted, out, note)
        return
    note(earlier.sentence(status.kept))
    if not (out.exists() or errors_path(out).exists()):  # an earlier run has moved them already
        return
    moved = set_aside(out)
    note(f"{out} held the results of batch {earlier.batch_id}: they are in {moved} now")


def _put_aside(
    status: BatchStatus, submitted: Submitted, out: Path, note: Callable[[str], None]
) -> None:
    """Move an OUT that holds answers of another generation aside, and print a note."""
    if holds_other(out, submitted.batch_id, submitted.relatives, status.maker):
        moved = set_aside(out)
        note(f"{out} held answers of another generation of this batch: they are in {moved} now")
