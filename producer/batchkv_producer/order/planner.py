"""The order in which a batch is queued: rows with a common prefix are next to each other.

The producer has no tokenizer, so it compares the *canonical text*: the tools, then roles and
messages (or the prompt), in the order in which a chat template renders them. ``prefix_order``
orders rows by it. Order and chunks are a pure function of the file and its defaults: chunk k holds
the same rows each time that the file is submitted, on any machine. So an interrupted submit is safe
to repeat.

All rows are stored in a temporary SQLite file in the directory that TMPDIR names. It is unlinked as
soon as it is open. So a million rows need no memory, and a crash leaves nothing.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from functools import lru_cache
from itertools import chain
from types import TracebackType
from typing import Any

from batchkv_producer.errors import DiskError
from batchkv_producer.intake.formats import Row, RowError
from batchkv_producer.intake.prompting import AUTO, Prompting, has_template
from batchkv_producer.order.canonical import canonical_text
from batchkv_producer.order.chunk import Chunk as Chunk
from batchkv_producer.order.chunk import PlanCounts as PlanCounts
from batchkv_producer.order.duplicates import can_have_duplicates, request_digest
from batchkv_producer.order.prefix_order import (
    Entry,
    in_windows,
    starts_prefix,
    text_key,
    with_shared,
    work_of,
)
from batchkv_producer.wire.job import ErrorCode, SamplingParams, encode_job
from batchkv_producer.wire.maker import needs_of
from batchkv_producer.wire.row_facts import pack, stretch_lines

CHUNK_ROWS = 500
CHUNK_BYTES = 8 * 2**20  # of text: a chunk ends after the row that reaches it

_SETUP = """
PRAGMA journal_mode = OFF;
PRAGMA synchronous = OFF;
PRAGMA temp_store = FILE;
PRAGMA cache_size = -16384;
CREATE TABLE rows (
    line INTEGER PRIMARY KEY, custom_id TEXT, sort_key BLOB, num_chars INTEGER,
    endpoint TEXT, code TEXT, message TEXT, data BLOB, size INTEGER, work INTEGER,
    same BLOB, needs TEXT, digest BLOB, mark BLOB);
CREATE TABLE followers (line INTEGER PRIMARY KEY, leader INTEGER);
CREATE TABLE earlier (digest BLOB PRIMARY KEY, line INTEGER) WITHOUT ROWID;
CREATE TABLE plan (chunk INTEGER, line INTEGER, shared INTEGER, starts INTEGER);
BEGIN;
"""
_ADD = "INSERT INTO rows VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_BY_CUSTOM_ID = "SELECT custom_id, line, code FROM rows ORDER BY custom_id, line"
_REFUSE = """
UPDATE rows SET code = ?, message = ?, sort_key = x'', work = -1, data = NULL WHERE line = ?
"""
_BY_DUPLICATE = """
SELECT same, line FROM rows WHERE same IS NOT NULL AND code IS NULL ORDER BY same, line
"""
_FOLLOW = "INSERT INTO followers VALUES (?, ?)"
_FOLLOWERS = """
SELECT line, size, 0, 0 FROM followers CROSS JOIN rows USING (line) ORDER BY followers.line
"""
_NO_FOLLOWER = "line NOT IN (SELECT line FROM followers)"
_BY_KEY = """
SELECT line, sort_key, size, work, 0 FROM rows WHERE {condition}
ORDER BY sort_key, work >= 0, line
"""  # a bad row has an empty key and work -1, so bad rows come first
_IN_ORDER = """
SELECT rows.line, sort_key, size, work, shared
FROM plan CROSS JOIN rows ON rows.line = plan.line
WHERE work >= 0 AND rows.line NOT IN (SELECT line FROM followers) ORDER BY plan.rowid
"""
_LEADER = "(SELECT leader FROM followers WHERE followers.line = plan.line)"
_FROM_CHUNK = """
SELECT plan.chunk, rows.line, custom_id, endpoint, code, message, data, shared, starts,
    {leader}, needs, earlier.line, mark
FROM plan CROSS JOIN rows ON rows.line = plan.line LEFT JOIN earlier ON earlier.digest = rows.digest
WHERE plan.chunk >= ? ORDER BY plan.rowid
"""  # a cross join keeps SQLite from swapping the loops
_ERRORS = """
SELECT line, custom_id, endpoint, code, message FROM rows WHERE code IS NOT NULL
ORDER BY line LIMIT ?
"""
_OTHER_THAN = "SELECT line FROM rows WHERE code IS NULL OR code != ? LIMIT 1"
_NUM_ALIKE = "SELECT COUNT(*) FROM rows JOIN earlier USING (digest) WHERE code IS NULL"
_NUM_SAMPLED = "SELECT COUNT(*) FROM rows WHERE code IS NULL AND mark IS NULL"
_COUNTS = "SELECT COUNT(*), COUNT(code), SUM(num_chars), MAX(line) FROM rows"


def with_defaults(defaults: SamplingParams) -> Callable[[SamplingParams], SamplingParams]:
    """A function that fills in the fields that a row leaves out."""
    unset = SamplingParams()
    names = [f.name for f in fields(SamplingParams)]
    given = {n: getattr(defaults, n) for n in names if getattr(defaults, n) != getattr(unset, n)}
    if not given:
        return lambda params: params

    @lru_cache(maxsize=256)  # most rows of a file have equal parameters
    def fill(params: SamplingParams) -> SamplingParams:
        missing = {n: v for n, v in given.items() if getattr(params, n) == getattr(unset, n)}
        return replace(params, **missing)

    return fill


class BatchPlan:
    """A batch on its way to the queue: fill it once, seal it, then read its chunks in order.

    ``dedupe``: a row waits for the first row with the same request (``duplicates``). ``place``
    returns a row's place in the input. ``cache_salt``: the salt of all rows. ``reuse``: rows may
    end with remembered answers.
    """

    def __init__(
        self,
        defaults: SamplingParams,
        *,
        dedupe: bool = False,
        prompting: Prompting = AUTO,
        cache_salt: str | None = None,
        reuse: bool = False,
    ) -> None:
        self._dedupe, self._cache_salt, self._reuse = dedupe, cache_salt, reuse
        self._prompting = prompting
        self.num_plain = 0  # plain prompts; see ``prompting``
        self.num_templated = 0  # rows that a chat template renders
        self.place: Callable[[int], str] = "line {}".format
        self._fill = with_defaults(defaults)
        self._is_plain = defaults == SamplingParams()
        self._stretch = 1  # lines whose facts are stored with one chunk
        self._database = sqlite3.connect("", isolation_level=None)  # "": a file that is unlinked
        self._database.executescript(_SETUP)

    def __enter__(self) -> BatchPlan:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._database.close()
        if isinstance(error, sqlite3.Error):
            raise DiskError(
                f"the temporary file for ordering the batch failed: {error}; "
                "set TMPDIR to a directory with more room"
            ) from error

    def add(self, rows: Iterable[Row | RowError]) -> None:
        """Store every row of the file in the table."""
        self._database.executemany(_ADD, map(self._record, rows))

    def seal(self) -> PlanCounts:
        """Refuse repeated ids, put the rows in order and cut them into chunks."""
        self._database.executemany(_REFUSE, self._repeated_ids())
        if self._dedupe:
            self._database.executemany(_FOLLOW, self._followers())
        self._database.executemany("INSERT INTO plan VALUES (?, ?, ?, ?)", self._cut())
        total, num_bad, num_chars, last_line = self._database.execute(_COUNTS).fetchone()
        num_duplicates = self._database.execute("SELECT COUNT(*) FROM followers").fetchone()[0]
        last_chunk = self._database.execute("SELECT MAX(chunk) FROM plan").fetchone()[0]
        num_chunks = 0 if last_chunk is None else last_chunk + 1
        self._stretch = stretch_lines(last_line or 0, num_chunks)
        return PlanCounts(
            total, num_bad, num_chars or 0, last_line or 0, num_chunks, num_duplicates
        )

    def is_all(self, code: str) -> bool:
        """Whether every row is wrong, with this code."""
        return not self._database.execute(_OTHER_THAN, (code,)).fetchone()

    def keep(self, answered: Iterable[tuple[bytes, int]]) -> int:
        """Store (digest, line) of an earlier batch's answers. Returns how many rows match."""
        self._database.executemany("INSERT OR IGNORE INTO earlier VALUES (?, ?)", answered)
        return int(self._database.execute(_NUM_ALIKE).fetchone()[0])

    def num_never_reused(self) -> int:
        """How many valid rows cannot end with a remembered answer, if others may."""
        return int(self._database.execute(_NUM_SAMPLED).fetchone()[0]) if self._reuse else 0

    def needs(self) -> str:
        """The abilities that its rows need and that older workers lack, between blanks."""
        found = self._database.execute("SELECT DISTINCT needs FROM rows WHERE code IS NULL")
        return " ".join(sorted({need for (needs,) in found for need in (needs or "").split()}))

    def errors(self, limit: int) -> tuple[RowError, ...]:
        """The first bad rows in the order of their lines."""
        return tuple(RowError(*row) for row in self._database.execute(_ERRORS, (limit,)))

    def chunks(self, start: int = 0) -> Iterator[Chunk]:
        """The chunks from number ``start`` on. One at a time is in memory."""
        chunk = self._chunk(start)
        query = _FROM_CHUNK.format(leader=_LEADER if self._dedupe else "NULL")
        for (
            number,
            line,
            custom_id,
            endpoint,
            code,
            message,
            data,
            shared,
            starts,
            leader,
            needs,
            kept,
            mark,
        ) in self._database.execute(query, (start,)):
            if number != chunk.number:
                yield chunk
                chunk = self._chunk(number)
            if needs:
                chunk.needs[line] = needs
            if mark is not None:
                chunk.reuse[line] = mark + custom_id.encode("utf-8", "surrogatepass")
            if leader is not None:
                chunk.duplicates.append((line, data, custom_id, leader))
            elif code is None:
                chunk.jobs.append((line, data, shared))
                if starts:
                    chunk.starts.add(line)
                if kept is not None:
                    chunk.kept[line] = (kept, custom_id)
            else:
                chunk.bad_rows.append(RowError(line, custom_id, endpoint, code, message))
        if chunk:
            yield chunk

    def _chunk(self, number: int) -> Chunk:
        return Chunk(number, [], [], facts=pack(self._database, number, self._stretch))

    def entries(self) -> Iterator[Entry]:
        """The good rows in the order of the queue."""
        return map(Entry._make, self._database.execute(_IN_ORDER))

    def num_rows_before(self, chunk: int) -> int:
        """The number of rows in the chunks before this one."""
        query = "SELECT COUNT(*) FROM plan WHERE chunk < ?"
        return int(self._database.execute(query, (chunk,)).fetchone()[0])

    def _record(self, row: Row | RowError) -> tuple[Any, ...]:
        """A row of the table. A bad row's key is empty, so that it comes first."""
        if isinstance(row, RowError):
            line, endpoint = row.line, row.endpoint
            wrong = (endpoint, row.code, row.message)
            return line, row.custom_id, b"", 0, *wrong, None, 0, -1, None, "", None, None
        line, request = row.line, row.request
        self.num_plain += request.style == "auto"
        request = self._prompting.apply(request)
        self.num_templated += has_template(request)
        text = canonical_text(request)
        raw = text.encode("utf-8")
        if not self._is_plain:
            request = replace(request, params=self._fill(request.params))
        if self._cache_salt is not None:
            request = replace(request, cache_salt=self._cache_salt)
        data = encode_job(request)
        key, size, num_chars = text_key(raw), len(raw), len(text)
        work = work_of(size, request.params.max_tokens, request.params.n or 1)
        custom_id, endpoint = request.custom_id, request.endpoint
        digest = request_digest(request)
        equal = digest if can_have_duplicates(request) else None
        same, mark = equal if self._dedupe else None, equal if self._reuse else None
        good = (endpoint, None, None, data, size, work, same, " ".join(needs_of(request)))
        return line, custom_id, key, num_chars, *good, digest, mark

    def _repeated_ids(self) -> Iterator[tuple[str, str, int]]:
        """The good rows whose id an earlier line has. A bad line keeps its id, too."""
        first_id, first_line = None, 0
        for custom_id, line, code in self._database.execute(_BY_CUSTOM_ID):
            if custom_id != first_id:
                first_id, first_line = custom_id, line
            elif code is None:
                shown = json.dumps(custom_id)[:80]
                message = f"custom_id {shown} is taken by {self.place(first_line)}"
                yield ErrorCode.DUPLICATE_CUSTOM_ID, message, line

    def _followers(self) -> Iterator[tuple[int, int]]:
        """(line, line of the leader) of every row with the same request as an earlier one."""
        first_key, first_line = None, 0
        for key, line in self._database.execute(_BY_DUPLICATE):
            if key != first_key:
                first_key, first_line = key, line
            else:
                yield line, first_line

    def _cut(self) -> Iterator[tuple[int, int, int, bool]]:
        """(chunk, line, shared bytes, whether it starts a prefix) of every row.

        Duplicates come before all other rows, in chunks of their own. So a duplicate is stored
        before its leader can end.
        """
        chunk = num_rows = num_bytes = 0
        waiting = self._database.execute(_FOLLOWERS) if self._dedupe else ()
        for is_first_part, rows in ((True, waiting), (False, self._sizes())):
            for line, size, shared, starts in rows:
                if num_rows == CHUNK_ROWS or num_bytes >= CHUNK_BYTES:
                    chunk, num_rows, num_bytes = chunk + 1, 0, 0
                num_rows, num_bytes = num_rows + 1, num_bytes + size
                yield chunk, line, shared, starts
            if is_first_part and num_rows:
                chunk, num_rows, num_bytes = chunk + 1, 0, 0

    def _sizes(self) -> Iterator[tuple[int, int, int, bool]]:
        before: Entry | None = None
        for entry in self._ordered():
            yield entry.line, entry.size, entry.shared, starts_prefix(before, entry)
            before = entry

    def _ordered(self) -> Iterator[Entry]:
        """Every row in the order of the queue, bad rows first."""
        by_key = _BY_KEY.format(condition=_NO_FOLLOWER if self._dedupe else "TRUE")
        rows = map(Entry._make, self._database.execute(by_key))
        for entry in rows:
            if entry.work >= 0:
                yield from in_windows(with_shared(chain((entry,), rows)))
                return
            yield entry
