"""A locked file of output lines of one batch: whole lines, one for each row.

``outfile`` uses two of them, for OUT and for its errors file.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from batchkv_producer.disk import is_full, sync
from batchkv_producer.errors import DiskError, UsageError
from batchkv_producer.wire import redis_keys

BUFFER_BYTES = 2**20

_OWN_LINE = re.compile(rb'\{"id": ?"([0-9a-f]{16})-([1-9][0-9]{0,11})",')


class OutputError(DiskError):
    """OUT could not be written: the disk is full or broken. The same command goes on later."""


class LineFile:
    """One open and locked file. Rows are appended as whole lines."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._buffer = bytearray()
        self._end = os.fstat(descriptor).st_size  # whole lines end here

    @classmethod
    def open(cls, path: Path) -> LineFile:
        """Open or create the file. UsageError if that fails or another process has locked it."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        if path.exists() and not path.is_file():
            kind = "a folder" if path.is_dir() else "not a regular file"
            raise UsageError(f"cannot write results to {path}: it is {kind}")
        while True:
            try:
                descriptor = os.open(path, flags, 0o644)
            except OSError as fault:
                raise UsageError(_cannot_open(path, fault)) from fault
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Another process may have replaced the file between the two calls.
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    _sync_folder(path)
                    return cls(path, descriptor)
            except BlockingIOError as fault:
                os.close(descriptor)
                raise UsageError(f"{path} is being written by another batchkv") from fault
            except FileNotFoundError:
                pass
            os.close(descriptor)

    def clear(self) -> None:
        """Delete the content of the file."""
        os.ftruncate(self._descriptor, 0)
        self._end = 0

    def close(self, *, remove_if_empty: bool = False) -> None:
        """Close and unlock the file.

        ``remove_if_empty`` deletes an empty file, unless another file has its name by now.
        """
        if remove_if_empty and os.fstat(self._descriptor).st_size == 0 and self._is_in_place():
            self.path.unlink(missing_ok=True)
        os.close(self._descriptor)

    def write(self, row: bytes) -> None:
        """Append a row with its newline to the buffer."""
        self._buffer += row
        if len(self._buffer) >= BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Append the buffer to the file.

        If the disk is full, the file is cut back to whole lines. Raises OutputError then, and if
        another program has deleted, replaced or cut the file.
        """
        self._check_untouched()
        position = self._end
        view = memoryview(bytes(self._buffer))
        self._buffer.clear()
        try:
            while view:
                num_written = os.pwrite(self._descriptor, view, position)
                position += num_written
                view = view[num_written:]
        except OSError as fault:
            os.ftruncate(self._descriptor, self._end)
            raise OutputError(_cannot_write(self.path, fault)) from fault
        self._end = position

    def sync(self) -> None:
        """Wait until the flushed rows are on the disk. Raises OutputError."""
        try:
            sync(self._descriptor)
        except OSError as fault:
            raise OutputError(_cannot_write(self.path, fault)) from fault

    def rows(self, batch_id: str) -> Iterator[tuple[int, bytes]]:
        """(line number, row with its newline) of every row. UsageError if a line is no row."""
        with self._reader() as file:
            for number, row in enumerate(file, 1):
                yield line_of(row, batch_id, self.path, number), row

    def first_row(self) -> bytes:
        """The first line of the file; b"" if it is empty."""
        with self._reader() as file:
            return file.readline(2**26)

    def cut_torn_line(self, batch_id: str) -> None:
        """Cut the bytes after the last newline, if they are a row that a crash has cut short."""
        start = self._end_of_last_line()
        if start == self._end:
            return
        tail = os.pread(self._descriptor, 64, start)
        if not _is_torn(tail, batch_id):
            raise UsageError(_not_ours(self.path, batch_id))
        os.ftruncate(self._descriptor, start)
        self._end = start

    def rewrite(self, batch_id: str, is_kept: Callable[[int], bool]) -> None:
        """Keep only some rows. A new file replaces the old one in one step."""
        self.flush()
        with replacement_for(self.path) as fresh:
            for line, row in self.rows(batch_id):
                if is_kept(line):
                    fresh.write(row)
            fresh.rename_to(self.path)
        self.adopt(fresh)

    def adopt(self, fresh: LineFile) -> None:
        """Use the open file ``fresh``, which has replaced this one on the disk."""
        os.close(self._descriptor)
        self._descriptor, self._end = fresh._descriptor, fresh._end

    def rename_to(self, path: Path) -> None:
        """Write this file to the disk and rename it to ``path``, which it replaces in one step."""
        self.flush()
        self.sync()
        target = Path(os.path.realpath(path))
        self.path.replace(target)
        _sync_folder(target)
        self.path = path

    def _is_in_place(self) -> bool:
        """Whether the file's name still names the open file.

        Some network file systems give an open file a new inode number. So a file with another
        number counts as the same one if the sizes are equal.
        """
        try:
            there = os.stat(self.path)
        except OSError:
            return False
        here = os.fstat(self._descriptor)
        return os.path.samestat(here, there) or here.st_size == there.st_size

    def _check_untouched(self) -> None:
        """Raise OutputError if another program has deleted, replaced or cut the file."""
        if not self._is_in_place():
            raise OutputError(_changed_by_another(self.path, "deleted, moved or replaced"))
        if os.fstat(self._descriptor).st_size < self._end:
            raise OutputError(_changed_by_another(self.path, "cut"))

    def _reader(self) -> BinaryIO:
        try:
            return open(self.path, "rb", buffering=BUFFER_BYTES)
        except FileNotFoundError as fault:
            raise OutputError(_changed_by_another(self.path, "deleted or moved")) from fault

    def _end_of_last_line(self) -> int:
        position = self._end
        while position > 0:
            start = max(0, position - BUFFER_BYTES)
            block = os.pread(self._descriptor, position - start, start)
            found = block.rfind(b"\n")
            if found >= 0:
                return start + found + 1
            position = start
        return 0


def line_of(row: bytes, batch_id: str, path: Path, number: int) -> int:
    """The input line of a row of OUT. UsageError if the row is no result of this batch."""
    match = _OWN_LINE.match(row)
    found = (match[1].decode(), int(match[2])) if match and row.endswith(b"}\n") else _parsed(row)
    if found is None:
        raise UsageError(
            f"{path} is not a file of results: its line {number} is no result. Choose another file "
            "with -o"
        )
    if found[0] != batch_id:
        raise UsageError(_other_batch(path, found[0], batch_id))
    return found[1]


def _parsed(row: bytes) -> tuple[str, int] | None:
    """The id in a line of JSON that another tool may have formatted anew."""
    try:
        value = json.loads(row)
    except (ValueError, RecursionError):
        return None
    job_id = value.get("id") if isinstance(value, dict) else None
    return redis_keys.parse_job_id(job_id) if isinstance(job_id, str) else None


def _is_torn(tail: bytes, batch_id: str) -> bool:
    begin = f'{{"id":"{batch_id}-'.encode()
    seen = tail.replace(b" ", b"")[: len(begin)]
    # After a power failure, data that was not written may read as zeros.
    return begin.startswith(seen.rstrip(b"\0")) and b"\n" not in tail


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # some file systems refuse it for folders
        pass
    finally:
        os.close(descriptor)


def _cannot_open(path: Path, fault: OSError) -> str:
    if fault.errno == errno.ENOENT and not path.parent.is_dir():
        return f"cannot write results to {path}: there is no folder {path.parent}"
    return f"cannot write results to {path}: {fault.strerror}"


def _cannot_write(path: Path, fault: OSError) -> str:
    what = "the disk is full" if is_full(fault) else "the disk refuses it"
    return (
        f"cannot write {path}: {what} ({fault.strerror}). Nothing is lost: "
        "make room and run the same command again"
    )


def _changed_by_another(path: Path, change: str) -> str:
    return (
        f"another program has {change} {path} while it was being written. No result is lost: run "
        "the same command again, and it writes the missing rows"
    )


def _not_ours(path: Path, batch_id: str) -> str:
    return f"{path} is not a file of results of batch {batch_id}. Choose another file with -o"


def _other_batch(path: Path, found: str, batch_id: str) -> str:
    return (
        f"{path} holds results of batch {found}, not of {batch_id}: the input, the model or the "
        "generation flags are different. Choose another file with -o"
    )


@contextmanager
def replacement_for(path: Path) -> Iterator[LineFile]:
    """An empty temporary file in the folder of ``path``, to be renamed to it. Deleted on failure.

    Its name is always ``.NAME.tmp``, so the file of a killed process is used again.
    """
    target = Path(os.path.realpath(path))
    place = target.with_name(f".{target.name}.tmp")
    if place.is_symlink():  # another program made it: the file that it points to must stay
        place.unlink()
    file = LineFile.open(place)
    try:
        file.clear()
        if target.exists():
            file.path.chmod(stat.S_IMODE(target.stat().st_mode))
        yield file
    except BaseException:
        if file.path != path:
            file.path.unlink(missing_ok=True)
        file.close()
        raise


def write_whole(path: Path, rows: Iterable[bytes]) -> int:
    """Write a new file and rename it to ``path`` at the end. Returns the number of rows."""
    num_rows = 0
    with replacement_for(path) as file:
        for row in rows:
            file.write(row)
            num_rows += 1
        file.rename_to(path)
    file.close()
    return num_rows
