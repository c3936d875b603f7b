"""The target of a run's results: the file OUT, or standard output."""

from __future__ import annotations

import sys
from pathlib import Path

from batchkv_producer.intake.source import Source, inputs_of
from batchkv_producer.progress import printable, rows
from batchkv_producer.results import outfile
from batchkv_producer.results.line_file import OutputError
from batchkv_producer.results.line_set import LineSet
from batchkv_producer.results.outfile import ResultsFile, Stale, encoded

STDOUT = Path("-")


class ResultStream:
    """Standard output instead of OUT: every row once, as it ends, also failed ones.

    Rows that an earlier run has printed are not known here. They are printed again.
    """

    def __init__(self) -> None:
        self.path = STDOUT
        self._printed = LineSet()
        self._stream = sys.stdout.buffer
        self._is_terminal = sys.stdout.isatty()

    def __enter__(self) -> ResultStream:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to do: ``Follower.collect`` has flushed every row."""

    @property
    def num_rows(self) -> int:
        """The number of rows that were printed."""
        return len(self._printed)

    def lacks(self, line: int, *, is_failed: bool) -> bool:
        """Whether a row's line must be printed. It is printed once, even if the row ends again."""
        return line not in self._printed

    def append(self, line: int, text: str, *, is_failed: bool) -> bool:
        """Print a row's output line. False if it was printed before."""
        if not self._printed.add(line):
            return False
        self._write(encoded(printable(text) if self._is_terminal else text))
        return True

    def flush(self) -> None:
        """Flush standard output."""
        self._write(b"")

    def refresh(self, stale: Stale | None) -> None:
        """Nothing to do: printed rows cannot be read back."""

    def _write(self, row: bytes) -> None:
        try:
            if row:
                self._stream.write(row)
            else:
                self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError as fault:
            raise OutputError(
                f"cannot write to standard output: {fault.strerror}. Nothing is lost: the same "
                "command again prints all rows"
            ) from fault


def check_target(out: Path, source: Source) -> None:
    """Refuse, before any work, an OUT that is the input or cannot be written."""
    if out == STDOUT:
        return
    for piece in inputs_of(source).pieces:
        outfile.check_target(out, piece.origin if isinstance(piece.origin, Path) else None)


def check_batch(out: Path, batch_id: str) -> None:
    """Refuse, before any work, an OUT that begins with results of another batch."""
    if out != STDOUT:
        outfile.check_batch(out, batch_id)


def open_results(out: Path, batch_id: str, stale: Stale | None) -> ResultsFile | ResultStream:
    """Open and lock OUT, or use standard output."""
    return ResultStream() if out == STDOUT else outfile.open_results(out, batch_id, stale)


def shown(out: Path) -> str:
    """The name of OUT in messages."""
    return "standard output" if out == STDOUT else str(out)


def after_interrupt(
    results: ResultsFile | ResultStream, batch_id: str, total: int, *, fresh: bool
) -> str:
    """The message for a run that was interrupted."""
    same, num_rows = "Without --fresh the same" if fresh else "The same", results.num_rows
    if results.path == STDOUT:
        place = "were printed"
        how = "command and input go on; they print these rows again"
    else:
        place = f"{'is' if num_rows == 1 else 'are'} in {results.path}"
        how = "command goes on from here"
    count = f"{num_rows:,} of {rows(total)} {place}"
    if num_rows >= total:
        return f"interrupted, when all rows had ended: {count}"
    return (
        f"interrupted: {count}. The others stay in the queue; `batchkv cancel {batch_id}` ends "
        f"them. {same} {how}"
    )
