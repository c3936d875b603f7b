"""OUT, the file that results are appended to, and OUT.errors.jsonl beside it.

OUT is the truth: one line a row, each id once, whatever crashes. It is only ever appended to in
whole lines, under a lock. What can be wrong with it after a crash is a torn last line, which is cut
when it is opened again. The errors file is derived from OUT: it holds a copy of every failed row's
line, and what it lacks is added when OUT is opened, so that no crash between two writes counts.

The results themselves stay in Redis: a row that did not reach OUT, because the disk was full for
example, is written the next time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from batchkv_producer import redis_keys
from batchkv_producer.errors import UsageError
from batchkv_producer.line_file import LineFile, OutputError, line_of, write_beside

SYNC_SECONDS = 1.0
PAGE_BITS = 2**16

_OK_END = (b'"error": null}\n', b'"error":null}\n')

Stale = Callable[[Sequence[int], Sequence[bytes]], set[int]]


class LineSet:
    """A set of line numbers in about one bit each: 125 kB for a million rows."""

    def __init__(self) -> None:
        self._pages: dict[int, bytearray] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, line: int) -> bool:
        page = self._pages.get(line // PAGE_BITS)
        bit = line % PAGE_BITS
        return page is not None and bool(page[bit >> 3] & (1 << (bit & 7)))

    def add(self, line: int) -> bool:
        """Put a line number in; False when it was there."""
        if line in self:
            return False
        page = self._pages.setdefault(line // PAGE_BITS, bytearray(PAGE_BITS // 8))
        bit = line % PAGE_BITS
        page[bit >> 3] |= 1 << (bit & 7)
        self._count += 1
        return True


class ResultsFile:
    """OUT, open and locked. Use ``open_results`` and ``with``; ``append`` then ``flush``.

    Every method that writes raises OutputError when the disk does not take it; what stands in the
    file is whole lines all the same.
    """

    def __init__(self, path: Path, batch_id: str, file: LineFile, errors: LineFile) -> None:
        self.path = path
        self.batch_id = batch_id
        self.present = LineSet()
        self._file = file
        self._errors = errors
        self._errors_present = LineSet()
        self._synced = time.monotonic()

    def __enter__(self) -> ResultsFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None or not issubclass(kind, OutputError):
                self.flush()
                self.sync()
        finally:
            self._errors.close(remove_if_empty=True)
            self._file.close()

    def has_failed(self, line: int) -> bool:
        """Whether the row stands in OUT as failed."""
        return line in self._errors_present and line in self.present

    def append(self, line: int, text: str, *, is_failed: bool) -> bool:
        """Write a row's output line (without its newline); False when its id was there already."""
        if line in self.present:
            return False
        row = encoded(text)
        self._file.write(row)
        self.present.add(line)
        if is_failed and self._errors_present.add(line):
            self._errors.write(row)
        return True

    def flush(self) -> None:
        """Hand everything to the system; to the disk itself about once a second."""
        self._file.flush()
        self._errors.flush()
        if time.monotonic() - self._synced > SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Wait until the disk has everything that was flushed."""
        self._file.sync()
        self._errors.sync()
        self._synced = time.monotonic()

    def refresh(self, stale: Stale | None) -> None:
        """Learn what both files hold; mend them where a crash or a retry left them behind."""
        self._read_errors()
        dropped = LineSet()
        is_behind = False
        for lines, rows in _in_chunks(self._read_rows()):
            is_behind |= any(line not in self._errors_present for line in lines)
            for line in stale(lines, rows) if stale else ():
                dropped.add(line)
        if len(dropped):
            self._drop(dropped)
        if is_behind:
            self._restore_errors()

    def _read_errors(self) -> None:
        self._errors_present = LineSet()
        for line, _ in self._errors.rows(self.batch_id):
            self._errors_present.add(line)

    def _read_rows(self) -> Iterator[tuple[int, bytes]]:
        """Note every row of OUT; yield the failed ones."""
        self.present = LineSet()
        for line, row in self._file.rows(self.batch_id):
            if not self.present.add(line):
                job_id = redis_keys.job_id(self.batch_id, line)
                raise UsageError(f"{self.path} holds {job_id} twice: choose another file with -o")
            if _is_failed(row):
                yield line, row

    def _drop(self, dropped: LineSet) -> None:
        """Rewrite both files without rows that have ended anew since (``batchkv retry``)."""
        for file in (self._file, self._errors):
            file.rewrite(self.batch_id, lambda line: line not in dropped)
        self._read_errors()
        for _ in self._read_rows():
            pass

    def _restore_errors(self) -> None:
        for line, row in self._file.rows(self.batch_id):
            if _is_failed(row) and self._errors_present.add(line):
                self._errors.write(row)
        self._errors.flush()


def open_results(path: Path, batch_id: str, stale: Stale | None = None) -> ResultsFile:
    """Open or create OUT for the results of one batch, lock it, and learn what it holds.

    ``stale`` is asked about the failed rows that stand in OUT (their line numbers and texts, a few
    hundred at a time) and names those that have since been run again; they are taken out.

    Raises UsageError, and changes nothing, when the file is a folder, cannot be written, is in use
    by another run, holds results of another batch, or is something else altogether.
    """
    file = LineFile.open(path)
    try:
        file.cut_torn_line(batch_id)
        _check_first_line(file, batch_id)
        errors = LineFile.open(errors_path(path))
    except BaseException:
        file.close()
        raise
    results = ResultsFile(path, batch_id, file, errors)
    try:
        errors.cut_torn_line(batch_id)
        results.refresh(stale)
    except BaseException:
        errors.close()
        file.close()
        raise
    return results


def check_target(path: Path, source: Path | None = None) -> None:
    """Refuse, before any work is done, an OUT that ``open_results`` would refuse at sight."""
    if path.name in ("", "-"):
        raise UsageError("results need a file with a name: choose it with -o")
    if source and path.exists() and source.exists() and path.samefile(source):
        raise UsageError(f"results cannot go to {path}: it is the input")
    was_there = path.exists()
    LineFile.open(path).close(remove_if_empty=not was_there)


def check_batch(path: Path, batch_id: str) -> None:
    """Refuse, before any work is done, an OUT that begins with results of another batch."""
    for part in (path, errors_path(path)):
        if part.exists():
            file = LineFile.open(part)
            try:
                file.cut_torn_line(batch_id)
                _check_first_line(file, batch_id)
            finally:
                file.close()


def write_new(path: Path, rows: Iterable[bytes], *, is_replaced: bool = False) -> int:
    """Write a file whole, in one step at its end; how many rows. It must be new, or empty.

    Raises UsageError when it is not (unless ``is_replaced``), OutputError when the disk is full.
    """
    if not is_replaced and path.exists() and path.stat().st_size:
        raise UsageError(f"{path} is there already: choose another file with -o, or remove it")
    file, num_rows = write_beside(path, rows)
    file.close()
    return num_rows


def errors_path(path: Path) -> Path:
    """Where the failed rows of OUT stand a second time."""
    return path.with_name(path.name + ".errors.jsonl")


def encoded(text: str) -> bytes:
    """A line as it stands in a file. A lone surrogate becomes its JSON escape."""
    return text.encode("utf-8", "backslashreplace") + b"\n"


def _check_first_line(file: LineFile, batch_id: str) -> None:
    row = file.first_row()
    if row:
        line_of(row, batch_id, file.path, 1)


def _is_failed(row: bytes) -> bool:
    """Whether an output line tells of a row that has no answer.

    In JSON a quote inside a string is written with a backslash, so the end of an ok line cannot
    be part of an answer.
    """
    return not row.endswith(_OK_END) and bool(json.loads(row).get("error"))


def _in_chunks(
    rows: Iterable[tuple[int, bytes]], size: int = 500
) -> Iterator[tuple[list[int], list[bytes]]]:
    lines: list[int] = []
    texts: list[bytes] = []
    for line, row in rows:
        lines.append(line)
        texts.append(row)
        if len(lines) == size:
            yield lines, texts
            lines, texts = [], []
    if lines:
        yield lines, texts
