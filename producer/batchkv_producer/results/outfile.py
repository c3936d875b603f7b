"""OUT, the file of answers, and OUT.errors.jsonl, the file of rows without an answer.

Each id is in one of the two, once. Both files are locked, and rows are appended as whole lines.
Both are read when they are opened. If a crash has cut the last line short, it is removed then.

A failed row may be queued again and end again. Then its new line is appended: an answer to OUT,
another failure to the errors file. The old line is removed from the errors file later, when the new
one is on the disk. If the process is killed in between, both lines are there, and the next opening
removes the old one. The next opening also moves a row that is in the wrong file: older versions
wrote failed rows into OUT, with a copy in the errors file.

The results stay in Redis. So a row that is in neither file, for example because the disk was full,
is written the next time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from batchkv_producer.errors import UsageError
from batchkv_producer.results.line_file import (
    LineFile,
    OutputError,
    line_of,
    replacement_for,
    write_whole,
)
from batchkv_producer.results.line_set import LineSet
from batchkv_producer.results.output import is_failed_line
from batchkv_producer.wire import redis_keys

SYNC_SECONDS = 1.0
TIDY_SECONDS = 10.0

Stale = Callable[[Sequence[int], Sequence[bytes]], set[int]]


class ResultsFile:
    """OUT and its errors file, open and locked. ``open_results``, ``append``, then ``flush``.

    Every method that writes raises OutputError if the disk refuses it. The files hold whole lines
    even then.
    """

    def __init__(self, path: Path, batch_id: str, answers: LineFile, errors: LineFile) -> None:
        self.path = path
        self.batch_id = batch_id
        self._answers = answers
        self._errors = errors
        self._ok = LineSet()  # rows in OUT
        self._failed = LineSet()  # rows in the errors file that stay there
        self._outdated = LineSet()  # rows in the errors file that were queued again since
        self._replaced = LineSet()  # rows whose first line in the errors file must be removed
        self._synced = self._tidied = time.monotonic()

    def __enter__(self) -> ResultsFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None or not issubclass(kind, OutputError):
                self.tidy()
        finally:
            self._errors.close(remove_if_empty=True)
            self._answers.close(remove_if_empty=kind is not None)  # it has not begun

    @property
    def num_ok(self) -> int:
        """The number of rows in OUT."""
        return len(self._ok)

    @property
    def num_failed(self) -> int:
        """The number of rows in the errors file, without those that were queued again."""
        return len(self._failed)

    @property
    def num_rows(self) -> int:
        """The number of rows in both files, without those that were queued again."""
        return self.num_ok + self.num_failed

    def lacks(self, line: int, *, is_failed: bool) -> bool:
        """Whether a row's line must be written. An answer replaces a failure, never the reverse."""
        return line not in self._ok and not (is_failed and line in self._failed)

    def append(self, line: int, text: str, *, is_failed: bool) -> bool:
        """Append a row's output line, given without its newline. False if it was not needed."""
        if not self.lacks(line, is_failed=is_failed):
            return False
        had_failed = self._failed.discard(line) or self._outdated.discard(line)
        if is_failed:
            self._errors.write(encoded(text))
            self._failed.add(line)
        else:
            self._answers.write(encoded(text))
            self._ok.add(line)
        if had_failed:
            self._replaced.add(line)
        return True

    def flush(self) -> None:
        """Write all buffered rows to the files, and about once a second wait for the disk."""
        self._answers.flush()
        self._errors.flush()
        now = time.monotonic()
        if len(self._replaced) and now - self._tidied > TIDY_SECONDS:
            self.tidy()
        elif now - self._synced > SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Wait until all flushed rows are on the disk."""
        self._answers.sync()
        self._errors.sync()
        self._synced = time.monotonic()

    def tidy(self) -> None:
        """Write everything to the disk, then remove replaced lines from the errors file."""
        self._answers.flush()
        self._errors.flush()
        self.sync()
        if len(self._replaced):
            is_first = self._replaced.discard
            self._errors.rewrite(
                self.batch_id, lambda line: not is_first(line) and line not in self._ok
            )
            self._replaced = LineSet()
        self._tidied = time.monotonic()

    def refresh(self, stale: Stale | None) -> None:
        """Read both files, and remove or move lines that a crash or an older version left."""
        self.tidy()
        misplaced = self._read_answers()
        self._read_errors()
        if len(misplaced):
            self._move_to_errors(misplaced)
        while len(self._replaced):
            self.tidy()
            self._read_errors()
        if stale:
            self._find_outdated(stale)

    def replace(self, rows: Iterable[tuple[int, str, bool]]) -> int:
        """Write both files anew from (line, text, is_failed) in this order. Returns their number.

        A row that is queued again keeps its line in the errors file. An answer that the server has
        lost, because it was restored from a copy, stays at the end.
        """
        seen = LineSet()
        with (
            replacement_for(self.path) as answers,
            replacement_for(errors_path(self.path)) as errors,
        ):
            for line, text, is_failed in rows:
                (errors if is_failed else answers).write(encoded(text))
                seen.add(line)
            num_rows = len(seen)
            for kept, fresh in ((self._answers, answers), (self._errors, errors)):
                for line, row in kept.rows(self.batch_id):
                    if seen.add(line):
                        fresh.write(row)
            errors.flush()  # a full disk must be noticed before the first file is replaced
            answers.rename_to(self.path)
            errors.rename_to(errors_path(self.path))
        self._answers.adopt(answers)
        self._errors.adopt(errors)
        self.refresh(None)
        return num_rows

    def _read_answers(self) -> LineSet:
        """Read the rows of OUT. Returns the failed rows among them, which are misplaced."""
        self._ok, misplaced = LineSet(), LineSet()
        for line, row in self._answers.rows(self.batch_id):
            if line in misplaced or not self._ok.add(line):
                job_id = redis_keys.job_id(self.batch_id, line)
                raise UsageError(f"{self.path} holds {job_id} twice: choose another file with -o")
            if is_failed_line(row):
                self._ok.discard(line)
                misplaced.add(line)
        return misplaced

    def _read_errors(self) -> None:
        """Read the rows of the errors file. A row with an answer or a later line is replaced."""
        self._failed, self._outdated, self._replaced = LineSet(), LineSet(), LineSet()
        for line, _ in self._errors.rows(self.batch_id):
            if line in self._ok or not self._failed.add(line):
                self._replaced.add(line)

    def _move_to_errors(self, misplaced: LineSet) -> None:
        """Move failed rows from OUT to the errors file. They leave OUT last."""
        for line, row in self._answers.rows(self.batch_id):
            if line in misplaced and self._failed.add(line):
                self._errors.write(row)
        self._errors.flush()
        self._errors.sync()
        self._answers.rewrite(self.batch_id, lambda line: line not in misplaced)

    def _find_outdated(self, stale: Stale) -> None:
        for lines, rows in _in_chunks(self._errors.rows(self.batch_id)):
            for line in stale(lines, rows):
                self._failed.discard(line)
                self._outdated.add(line)


def open_results(path: Path, batch_id: str, stale: Stale | None = None) -> ResultsFile:
    """Open or create OUT for the results of one batch, lock it, and read it.

    ``stale`` gets the line numbers and texts of rows in the errors file, a few hundred at a time.
    It returns the lines of rows that were queued again since, or have another text now.

    Raises UsageError, and changes nothing, if the file is a folder, cannot be written, is in use by
    another run, holds results of another batch, or is no file of results.
    """
    answers = LineFile.open(path)
    try:
        answers.cut_torn_line(batch_id)
        _check_first_line(answers, batch_id)
        errors = LineFile.open(errors_path(path))
    except BaseException:
        answers.close()
        raise
    results = ResultsFile(path, batch_id, answers, errors)
    try:
        errors.cut_torn_line(batch_id)
        results.refresh(stale)
    except BaseException:
        errors.close()
        answers.close()
        raise
    return results


def check_target(path: Path, source: Path | None = None) -> None:
    """Refuse, before any work, an OUT that is the input or cannot be opened and locked."""
    if path.name in ("", "-"):
        raise UsageError("results need a file with a name: choose it with -o")
    if source and path.exists() and source.exists() and path.samefile(source):
        raise UsageError(f"results cannot go to {path}: it is the input")
    was_there = path.exists()
    LineFile.open(path).close(remove_if_empty=not was_there)


def check_batch(path: Path, batch_id: str) -> None:
    """Refuse, before any work, an OUT that begins with results of another batch."""
    for part in (path, errors_path(path)):
        if part.exists():
            file = LineFile.open(part)
            try:
                file.cut_torn_line(batch_id)
                _check_first_line(file, batch_id)
            finally:
                file.close()


def write_new(path: Path, rows: Iterable[bytes]) -> int:
    """Write a new file, which appears in one step at the end. Returns the number of rows.

    Raises UsageError if the file exists and is not empty, OutputError if the disk is full.
    """
    if path.exists() and path.stat().st_size:
        raise UsageError(f"{path} exists: choose another file with -o, or remove it")
    return write_whole(path, rows)


def errors_path(path: Path) -> Path:
    """The path of the errors file, which holds the rows without an answer."""
    return path.with_name(path.name + ".errors.jsonl")


def encoded(text: str) -> bytes:
    """A line as bytes for a file, with its newline. A lone surrogate becomes its JSON escape."""
    return text.encode("utf-8", "backslashreplace") + b"\n"


def _check_first_line(file: LineFile, batch_id: str) -> None:
    row = file.first_row()
    if row:
        line_of(row, batch_id, file.path, 1)


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
