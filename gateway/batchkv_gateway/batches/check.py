"""Checks a batch's input as OpenAI does: all lines, or none. Errors have the numbers of lines."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from batchkv_producer.intake.body import ENDPOINTS
from batchkv_producer.intake.formats import BOM, NOT_OF_LINE, Row, RowError, read_rows
from batchkv_producer.intake.single import param_of
from batchkv_producer.wire.error_codes import ErrorCode

MAX_ERRORS = 100
_OF_LINE = ("custom_id", "method", "url", "body")  # the fields of a line itself
_FIRST_WORD = re.compile(r"[A-Za-z_]\w*")
LINE_BYTES = 2**20
# OpenAI's names of the producer's codes.
_CODES: dict[str, str] = {
    ErrorCode.INVALID_JSON: "invalid_json_line",
    ErrorCode.DUPLICATE_CUSTOM_ID: "duplicate_custom_id",
    ErrorCode.UNSUPPORTED_PARAMETER: "unsupported_parameter",
}


@dataclass(frozen=True, slots=True)
class LineError:
    """Why a batch fails. ``line`` is None if it is the file as a whole."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


def check_input(
    path: Path, endpoint: str, max_rows: int, *, is_strict: bool
) -> tuple[LineError, ...]:
    """The errors of an input, at most ``MAX_ERRORS``. Without ``is_strict`` lines are only counted.

    One line is in memory at a time, and the custom_ids of all.
    """
    with path.open("rb") as stream:
        num_rows = _count_rows(stream)
        if num_rows > max_rows:
            message = f"the file has {num_rows:,} rows; at most {max_rows:,} are accepted"
            return (LineError("too_many_tasks", message),)
        if not num_rows:
            return (LineError("empty_file", "the file has no rows"),)
        if not is_strict:
            return ()
        stream.seek(0)
        found = _Lines(stream, endpoint).errors()
        return tuple(error for error, _ in zip(found, range(MAX_ERRORS), strict=False))


def num_rows_of(path: Path) -> int:
    """The number of rows of an input."""
    with path.open("rb") as stream:
        return _count_rows(stream)


def _count_rows(stream: BinaryIO) -> int:
    """The number of lines that are not blank."""
    count, is_blank, is_first = 0, True, True
    while piece := stream.readline(LINE_BYTES):
        text = piece.removeprefix(BOM) if is_first else piece
        is_first = False
        is_blank = is_blank and not text.strip()
        if piece.endswith(b"\n"):
            count, is_blank = count + (not is_blank), True
    return count + (not is_blank)


@dataclass(slots=True)
class _Lines:
    """Reads rows, and remembers the bytes of the last line."""

    stream: BinaryIO
    endpoint: str
    last: bytes = b""
    model: str | None = None
    lines_of: dict[str, int] = field(default_factory=dict)

    def readline(self, limit: int) -> bytes:
        self.last = self.stream.readline(limit)
        return self.last

    def errors(self) -> Iterator[LineError]:
        """The first error of each line that has one."""
        for row in read_rows(cast(BinaryIO, self)):
            error = self._refused(row) if isinstance(row, RowError) else self._error_of(row)
            if error is not None:
                yield error

    def _error_of(self, row: Row) -> LineError | None:
        line = _parsed(self.last)
        lacks = [name for name in ("custom_id", "method", "url") if line.get(name) is None]
        if lacks and row.model is None:
            lacks.append("body.model")
        if lacks:
            return _missing(row.line, lacks)
        if line["url"] != self.endpoint:
            return self._other_url(row.line, line["url"])
        if row.model is None:
            return _missing(row.line, ["body.model"])
        first = self.lines_of.setdefault(row.request.custom_id, row.line)
        if first != row.line:
            message = f"line {first} has the same custom_id"
            return LineError("duplicate_custom_id", message, row.line, "custom_id")
        self.model = self.model or row.model
        if row.model != self.model:
            message = f"the model is {row.model[:80]!r}, but earlier lines name {self.model[:80]!r}"
            return LineError("mismatched_model", message, row.line, "body.model")
        return None

    def _refused(self, row: RowError) -> LineError:
        """The error of a line that cannot be run. Its url may be the reason."""
        url = _parsed(self.last).get("url")
        if isinstance(url, str) and url in ENDPOINTS and url != self.endpoint:
            return self._other_url(row.line, url)
        code = _CODES.get(row.code, "invalid_request")
        return LineError(code, row.message, row.line, _place(row))

    def _other_url(self, line: int, url: str) -> LineError:
        message = f"the url is {url}, but the batch is for {self.endpoint}"
        return LineError("mismatched_endpoint", message, line, "url")


def _parsed(line: bytes) -> dict[str, Any]:
    """The object of a line; empty if it is none."""
    try:
        found = json.loads(line.removeprefix(BOM))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _place(row: RowError) -> str | None:
    """The field of a line that its error is about, with its path. Messages begin with its name."""
    name = _FIRST_WORD.match(row.message)
    if name is not None and (name[0] in _OF_LINE or row.message.endswith(NOT_OF_LINE)):
        return name[0]
    param = param_of(row.code, row.message)
    return f"body.{param}" if param else None


def _missing(line: int, names: Sequence[str]) -> LineError:
    message = f"the line has no {', no '.join(names)}"
    return LineError("missing_required_parameter", message, line, names[0])
