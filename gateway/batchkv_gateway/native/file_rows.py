"""The rows of an ended batch of OpenAI's API. They have left the queue: its files have them.

The lines of both files are in the order of the input, and each has the number of its input line in
its id. So a page reads the files up to its rows, and parses these alone. Prompts are those of the
input, as long as it is kept. The files do not say which worker answered, nor how long it took.
"""

from __future__ import annotations

import heapq
import json
import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from pathlib import Path

from batchkv_gateway.batches.record import BatchRecord
from batchkv_gateway.files.records import Files
from batchkv_gateway.native.file_results import error_of, is_canceled, is_refused, result_of
from batchkv_gateway.native.rows import RowPage, RowParts, facts_of_row
from batchkv_producer.errors import NotFoundError
from batchkv_producer.intake.formats import BOM, MAX_LINE_BYTES, Row, read_rows
from batchkv_producer.manage.cancel_retry import Unanswered
from batchkv_producer.results.failures import Failures, grouped
from batchkv_producer.wire.error_codes import ErrorCode
from batchkv_producer.wire.job import Request, Result

_LINE = re.compile(rb'\{"id": ?"[^"\\]*-([0-9]{1,12})"')


@dataclass(frozen=True, slots=True)
class FileRow:
    """A line of a file. ``line`` is the number of its input line."""

    line: int
    raw: bytes


class FileRows:
    """Reads the rows of one batch."""

    def __init__(self, files: Files, record: BatchRecord) -> None:
        self._files, self._record = files, record
        self._input = files.folder.content(record.content)

    @property
    def has_input(self) -> bool:
        """Whether the input is still there."""
        return self._input.is_file()

    def page(self, after: int, limit: int, outcome: str, *, full: bool) -> RowPage:
        """The rows after a line, like ``rows.page_of_rows``."""
        rows = (self._parts(row) for row in self._rows(outcome) if row.line > after)
        wanted = (row for row in rows if outcome in ("", _outcome_of(row)))
        found = list(islice(wanted, limit + 1))
        shown = found[:limit]
        requests = self._requests({row.line for row in shown})
        facts = [
            facts_of_row(RowParts(r.job_id, r.line, r.result, "", requests.get(r.line)), full=full)
            for r in shown
        ]
        return RowPage(facts, shown[-1].line if len(found) > limit else 0)

    def results(self) -> Iterator[tuple[int, Result]]:
        """(line, result) of all rows, by line. A file that is gone raises NotFoundError at once."""
        return ((row.line, result_of(json.loads(row.raw))) for row in self._rows(""))

    @property
    def batch_id(self) -> str:
        """The id that the batch had in the queue."""
        return self._record.queued_id or self._record.batch_id

    def failures(self) -> list[Failures]:
        """The failed rows by code, the most frequent first."""
        return grouped(self._failed())

    def _failed(self) -> Iterator[tuple[int, Result]]:
        for row in self._rows("failed"):
            parts = self._parts(row)
            if parts.result is not None and parts.result.outcome == "failed":
                yield row.line, parts.result

    def unanswered(self) -> Unanswered:
        """The rows without an answer, by the reason."""
        reasons, refused = self._reasons()
        again = sum(reasons[line] == "failed" for line in refused)
        return Unanswered(**Counter(reasons.values()), refused=again)

    def lines_to_retry(self, *, canceled: bool) -> set[int]:
        """The input lines of failed (and canceled) rows that can be computed again."""
        wanted = ("failed", "canceled") if canceled else ("failed",)
        return {line for line, reason in self.reasons().items() if reason in wanted}

    def reasons(self) -> dict[int, str]:
        """Line -> why it has no answer, as a field of ``Unanswered``."""
        return self._reasons()[0]

    def _reasons(self) -> tuple[dict[int, str], set[int]]:
        """Line -> why it has no answer, as a field of ``Unanswered``; and the refused lines."""
        found, refused = dict[int, str](), set[int]()
        for row in self._rows("failed"):
            value = json.loads(row.raw)
            found[row.line] = "canceled" if is_canceled(value) else "failed"
            if is_refused(value):
                refused.add(row.line)
                if error_of(value)[0] == ErrorCode.DUPLICATE_CUSTOM_ID:
                    found[row.line] = "wrong"
        # A worker may have refused the others: another one may accept them.
        right = self._requests(refused) if self.has_input else {}
        found |= dict.fromkeys(refused - right.keys(), "wrong")
        if not self.has_input:
            found = {line: "wrong" if line in refused else "expired" for line in found}
        return found, refused

    def input_lines(self, wanted: Collection[int]) -> Iterator[tuple[int, bytes]]:
        """(number, text) of these lines of the input, each with its end."""
        if not wanted or not self.has_input:
            return
        last = max(wanted)
        with self._input.open("rb") as stream:
            number = 0
            while number < last and (raw := stream.readline(MAX_LINE_BYTES + 1)):
                number += 1
                if number in wanted:
                    yield number, raw.removeprefix(BOM).rstrip(b"\r\n") + b"\n"

    def _requests(self, wanted: Collection[int]) -> dict[int, Request]:
        found = {}
        for number, raw in self.input_lines(wanted):
            for row in read_rows(BytesIO(raw)):
                if isinstance(row, Row):
                    found[number] = row.request
        return found

    def _rows(self, outcome: str) -> Iterator[FileRow]:
        """The rows of the files that may have rows of this outcome, by line."""
        answers, errors = self._record.output_file_id, self._record.error_file_id
        ids = {"": (answers, errors), "ok": (answers,)}.get(outcome, (errors,))
        streams = [_lines(self._path(each)) for each in ids if each]
        return heapq.merge(*streams, key=lambda row: row.line)

    def _path(self, file_id: str) -> Path:
        file = self._files.read(file_id)
        path = self._files.folder.content(file.content_name) if file else None
        if path is None or not path.is_file():
            raise NotFoundError(
                f"a file of batch {self._record.batch_id} is gone: it was deleted or has expired"
            )
        return path

    def _parts(self, row: FileRow) -> RowParts:
        value = json.loads(row.raw)
        return RowParts(str(value.get("id", "")), row.line, result_of(value))


def _lines(path: Path) -> Iterator[FileRow]:
    with path.open("rb") as stream:
        for raw in stream:
            match = _LINE.match(raw)
            if match is not None:
                yield FileRow(int(match[1]), raw)


def _outcome_of(row: RowParts) -> str:
    return row.result.outcome if row.result is not None else ""
