"""Moves an OUT with answers of another generation to OUT.1.old.jsonl. It is never overwritten."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection
from functools import partial
from pathlib import Path

from batchkv_producer.results.line_file import LineFile, OutputError
from batchkv_producer.results.outfile import errors_path
from batchkv_producer.results.target import STDOUT
from batchkv_producer.wire.maker import Maker
from batchkv_producer.wire.redis_keys import parse_job_id

MAX_LINE_BYTES = 2**26


def holds_other(out: Path, batch_id: str, relatives: Collection[str], maker: Maker) -> bool:
    """Whether OUT begins with rows of another generation, or of another maker.

    A batch that was forgotten, or lost with its server, has the same id when it is submitted again.
    Then only the maker (weights, scheme, dtype) may differ.
    """
    if out == STDOUT:
        return False
    return any(_is_other(part, batch_id, relatives, maker) for part in (out, errors_path(out)))


def set_aside(out: Path) -> Path:
    """Move OUT and its errors file to a free name and return that name. Raises OutputError.

    The errors file is moved first. If the process is killed then, the next call moves OUT.
    """
    has_errors = errors_path(out).exists()
    names = map(partial(_name, out), itertools.count(1))
    free = next(
        name
        for name in names
        if not name.exists() and not (has_errors and errors_path(name).exists())
    )
    try:
        for source, target in ((errors_path(out), errors_path(free)), (out, free)):
            if source.exists():
                file = LineFile.open(source)  # locks it, so that no other process writes to it
                try:
                    source.rename(target)
                finally:
                    file.close()
    except OSError as fault:
        raise OutputError(f"{out} cannot be moved aside: {fault.strerror or fault}") from fault
    return free


def newest_aside(out: Path) -> Path | None:
    """The name that OUT was moved to last. None if it never was."""
    last = None
    for number in itertools.count(1):
        name = _name(out, number)
        if not (name.exists() or errors_path(name).exists()):
            return last
        last = name
    return None


def _name(out: Path, number: int) -> Path:
    return out.with_name(f"{out.name}.{number}.old.jsonl")


def _is_other(part: Path, batch_id: str, relatives: Collection[str], maker: Maker) -> bool:
    row = first_row(part)
    parsed = parse_job_id(str(row.get("id")))
    if parsed is None:
        return False
    if parsed[0] != batch_id:
        return parsed[0] in relatives
    response = row.get("response")
    body = response.get("body") if isinstance(response, dict) else None
    mark = body.get("system_fingerprint") if isinstance(body, dict) else None
    return isinstance(mark, str) and not maker.may_have_made(mark)


def first_row(part: Path) -> dict[str, object]:
    """The first row of OUT or of its errors file. Empty if the first line is no row."""
    try:
        with part.open("rb") as stream:
            row = json.loads(stream.readline(MAX_LINE_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}
