"""Rows that a program passes as dicts, read like the lines of a file."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

from batchkv_producer.errors import UsageError
from batchkv_producer.intake.source import Inputs, Piece, Source

ROWS_NAME = "rows"

Rows = Iterable[Mapping[str, Any]]
Given = Source | Rows


def as_source(given: Given) -> Source:
    """A source unchanged; rows as JSON lines with sorted keys, because these name the batch.

    Raises UsageError for anything else.
    """
    if isinstance(given, str | Path | Inputs):
        return given
    if hasattr(given, "readline"):
        return cast("BinaryIO", given)
    if isinstance(given, Mapping):
        raise UsageError("submit takes a list of rows: put the one row into [...]")
    lines = b"".join(_line(number, row) for number, row in enumerate(given, 1))
    return Inputs((Piece(io.BytesIO(lines), ROWS_NAME, start=0),), "jsonl")


def _line(number: int, row: object) -> bytes:
    if not isinstance(row, Mapping):
        raise UsageError(f"row {number} is a {type(row).__name__}: a row is a dict, as in a file")
    try:
        text = json.dumps(dict(row), sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as fault:
        raise UsageError(f"row {number} cannot be written as JSON: {fault}") from fault
    return text.encode("ascii") + b"\n"
