"""OUT, the file of answers, and OUT.errors.jsonl beside it, the file of rows that have none.

Each id is in one of them, once. Both are only ever appended to in whole lines, under a lock, and
both are read when they are opened. A torn last line, which a crash may leave, is cut then.

A row that failed, was queued again and has ended since changes its line: an answer is appended to
OUT, another failure to the errors file, and the old line leaves the errors file later, when the new
one is on the disk. A process that is killed in between leaves both lines; the next opening takes
the old one out. In the same way it moves a row that stands in the wrong file, as failed rows of
older versions do, which wrote them into OUT with a copy in the errors file.

The results themselves stay in Redis: a row that reached neither file, because the disk was full for
example, is written the next time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from batchkv_producer.errors import UsageError
from batchkv_producer.results.line_file import LineFile, OutputError, beside, line_of, write_whole
from batchkv_producer.results.line_set import LineSet
from batchkv_producer.results.output import is_failed_line
from batchkv_producer.wire import redis_keys

SYNC_SECONDS = 1.0
TIDY_SECONDS = 10.0

Stale = Callable[[Sequence[int], Sequence[bytes]], set[int]]


class ResultsFile:
    """OUT and its errors file, open and locked. ``open_results``, ``append``, then ``flush``.

    Every method that writes raises OutputError when the disk does not take it; what stands in the
    files is whole lines all the same.
    """

    def __init__(self, path: Path, batch_id: str, answers: LineFile, errors: LineFile) -> None:
        self.path = path
        self.batch_id = batch_id
        self._answers = answers
        self._errors = errors
        self._ok = LineSet()  # in OUT
        self._failed = LineSet()  # in the errors file, and to stay there
        self._outdated = LineSet()  # in the errors file, but queued again since
        self._replaced = LineSet()  # of these lines the first in the errors file is to go
        self._synced = self._tidied = time.monotonic()

    def __enter__(self) -> ResultsFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None or not issubclass(kind, OutputError):
                self.tidy()
        finally:
            self._errors.close(remove_if_empty=True)
            self._answers.close()

    @property
    def num_ok(self) -> int:
        """Rows in OUT."""
        return len(self._ok)

    @property
    def num_failed(self) -> int:
        """Rows in the errors file, those that have been queued again aside."""
        return len(self._failed)

    @property
    def num_rows(self) -> int:
        return self.num_ok + self.num_failed

    def lacks(self, line: int, *, is_failed: bool) -> bool:
        """Whether a row's line is to be written. An answer stays; a failure gives way to one."""
        return line not in self._ok and not (is_failed and line in self._failed)

    def append(self, line: int, text: str, *, is_failed: bool) -> bool:
        """Write a row's output line (without its newline); False when its id was there already."""
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
        """Hand everything to the system; to the disk itself about once a second."""
        self._answers.flush()
        self._errors.flush()
        now = time.monotonic()
        if len(self._replaced) and now - self._tidied > TIDY_SECONDS:
            self.tidy()
        elif now - self._synced > SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Wait until the disk has everything that was flushed."""
        self._answers.sync()
        self._errors.sync()
        self._synced = time.monotonic()

    def tidy(self) -> None:
        """Bring all to the disk; then take out of the errors file what has been replaced."""
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
        """Learn what both files hold, and finish what a crash left undone."""
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
        """Write both files anew, in this order: (line, text, whether it failed); how many rows.

        A row that is queued again keeps its line in the errors file. An answer that the server
        has lost since (it was restored from a copy) stays, at the end.
        """
        seen = LineSet()
        with beside(self.path) as answers, beside(errors_path(self.path)) as errors:
            for line, text, is_failed in rows:
                (errors if is_failed else answers).write(encoded(text))
                seen.add(line)
            num_rows = len(seen)
            for kept, fresh in ((self._answers, answers), (self._errors, errors)):
                for line, row in kept.rows(self.batch_id):
                    if seen.add(line):
                        fresh.write(row)
            errors.flush()  # a full disk is to be known before the first file is in its place
            answers.put_in_place_of(self.path)
            errors.put_in_place_of(errors_path(self.path))
        self._answers.adopt(answers)
        self._errors.adopt(errors)
        self.refresh(None)
        return num_rows

    def _read_answers(self) -> LineSet:
        """Note the rows of OUT; those among them that have failed."""
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
        """Note the rows of the errors file. One that OUT has too, or a later line, is to go."""
        self._failed, self._outdated, self._replaced = LineSet(), LineSet(), LineSet()
        for line, _ in self._errors.rows(self.batch_id):
            if line in self._ok or not self._failed.add(line):
                self._replaced.add(line)

    def _move_to_errors(self, misplaced: LineSet) -> None:
        """Take failed rows out of OUT, after they are in the errors file and on the disk."""
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
    """Open or create OUT for the results of one batch, lock it, and learn what it holds.

    ``stale`` is asked about the rows in the errors file (their line numbers and texts, a few
    hundred at a time) and names those that have since been run again, or have another line now.

    Raises UsageError, and changes nothing, when the file is a folder, cannot be written, is in use
    by another run, holds results of another batch, or is something else altogether.
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


def write_new(path: Path, rows: Iterable[bytes]) -> int:
    """Write a file whole, in one step at its end; how many rows. It must be new, or empty.

    Raises UsageError when it is not, OutputError when the disk is full.
    """
    if path.exists() and path.stat().st_size:
        raise UsageError(f"{path} is there already: choose another file with -o, or remove it")
    return write_whole(path, rows)


def errors_path(path: Path) -> Path:
    """Where the rows without an answer stand."""
    return path.with_name(path.name + ".errors.jsonl")


def encoded(text: str) -> bytes:
    """A line as it stands in a file. A lone surrogate becomes its JSON escape."""
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
