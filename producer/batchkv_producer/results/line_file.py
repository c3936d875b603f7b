"""A locked file of whole lines, each the output line of one row of one batch.

``outfile`` makes OUT and its errors file of two of these.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from batchkv_producer.disk import is_full
from batchkv_producer.errors import DiskError, UsageError
from batchkv_producer.wire import redis_keys

BUFFER_BYTES = 2**20

_OWN_LINE = re.compile(rb'\{"id": ?"([0-9a-f]{16})-([1-9][0-9]{0,11})",')


class OutputError(DiskError):
    """OUT could not be written to its end: the disk is full or broken. A rerun goes on."""


class LineFile:
    """One locked file of whole lines, each an output line of one batch, appended to."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._buffer = bytearray()
        self._end = os.fstat(descriptor).st_size  # everything before is whole lines

    @classmethod
    def open(cls, path: Path) -> LineFile:
        """Open or create; UsageError when that is refused or another process has it locked."""
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
                # Somebody may have put a new file in its place between the two calls.
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
        """Let nothing be in it."""
        os.ftruncate(self._descriptor, 0)
        self._end = 0

    def close(self, *, remove_if_empty: bool = False) -> None:
        """Let the file and its lock go. Somebody else's file of this name stays."""
        if remove_if_empty and os.fstat(self._descriptor).st_size == 0 and self._is_in_place():
            self.path.unlink(missing_ok=True)
        os.close(self._descriptor)

    def write(self, row: bytes) -> None:
        self._buffer += row
        if len(self._buffer) >= BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Append what is buffered; on a full disk what was written of it is cut off again.

        Nothing is written any more once another program has deleted, replaced or cut the file.
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
        try:
            if sys.platform == "darwin":  # fsync there leaves data in the drive's own cache
                try:
                    fcntl.fcntl(self._descriptor, fcntl.F_FULLFSYNC)
                    return
                except OSError:  # network file systems have no such call
                    pass
            os.fsync(self._descriptor)
        except OSError as fault:
            raise OutputError(_cannot_write(self.path, fault)) from fault

    def rows(self, batch_id: str) -> Iterator[tuple[int, bytes]]:
        """(line number, row with its newline) of every row; UsageError on anything else."""
        with self._reader() as file:
            for number, row in enumerate(file, 1):
                yield line_of(row, batch_id, self.path, number), row

    def first_row(self) -> bytes:
        with self._reader() as file:
            return file.readline(2**26)

    def cut_torn_line(self, batch_id: str) -> None:
        """Cut what stands after the last newline, if it is what a crash leaves of a line."""
        start = self._end_of_last_line()
        if start == self._end:
            return
        tail = os.pread(self._descriptor, 64, start)
        if not _is_torn(tail, batch_id):
            raise UsageError(_not_ours(self.path, batch_id))
        os.ftruncate(self._descriptor, start)
        self._end = start

    def rewrite(self, batch_id: str, is_kept: Callable[[int], bool]) -> None:
        """Keep some rows only. The new file takes the place of the old one in one step."""
        self.flush()
        with beside(self.path) as fresh:
            for line, row in self.rows(batch_id):
                if is_kept(line):
                    fresh.write(row)
            fresh.put_in_place_of(self.path)
        self.adopt(fresh)

    def adopt(self, fresh: LineFile) -> None:
        """Go on with the file that has been put in the place of this one."""
        os.close(self._descriptor)
        self._descriptor, self._end = fresh._descriptor, fresh._end

    def put_in_place_of(self, path: Path) -> None:
        """Give a file that was written ``beside`` another the other's name, in one step."""
        self.flush()
        self.sync()
        target = Path(os.path.realpath(path))
        self.path.replace(target)
        _sync_folder(target)
        self.path = path

    def _is_in_place(self) -> bool:
        """Whether the name still leads to the file that is open, as far as can be told.

        Some network file systems number a file anew; one of another size is another file.
        """
        try:
            there = os.stat(self.path)
        except OSError:
            return False
        here = os.fstat(self._descriptor)
        return os.path.samestat(here, there) or here.st_size == there.st_size

    def _check_untouched(self) -> None:
        """Raise OutputError when what is appended would not stand behind what was written."""
        if not self._is_in_place():
            raise OutputError(_meddled(self.path, "deleted, moved or replaced"))
        if os.fstat(self._descriptor).st_size < self._end:
            raise OutputError(_meddled(self.path, "cut"))

    def _reader(self) -> BinaryIO:
        try:
            return open(self.path, "rb", buffering=BUFFER_BYTES)
        except FileNotFoundError as fault:
            raise OutputError(_meddled(self.path, "deleted or moved")) from fault

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
    """The line number that a row of OUT is the result of."""
    match = _OWN_LINE.match(row)
    found = (match[1].decode(), int(match[2])) if match and row.endswith(b"}\n") else _parsed(row)
    if found is None:
        raise UsageError(
            f"{path} is not a file of results: line {number} is none. Choose another with -o"
        )
    if found[0] != batch_id:
        raise UsageError(_other_batch(path, found[0], batch_id))
    return found[1]


def _parsed(row: bytes) -> tuple[str, int] | None:
    """The id in a line that is JSON but was perhaps formatted anew by another tool."""
    try:
        value = json.loads(row)
    except (ValueError, RecursionError):
        return None
    job_id = value.get("id") if isinstance(value, dict) else None
    return redis_keys.parse_job_id(job_id) if isinstance(job_id, str) else None


def _is_torn(tail: bytes, batch_id: str) -> bool:
    begin = f'{{"id":"{batch_id}-'.encode()
    seen = tail.replace(b" ", b"")[: len(begin)]
    # A machine that lost its power may leave zeros where the data did not arrive.
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
    if fault.errno == errno.ENOENT:
        return f"cannot write results to {path}: there is no folder {path.parent}"
    return f"cannot write results to {path}: {fault.strerror}"


def _cannot_write(path: Path, fault: OSError) -> str:
    what = "the disk is full" if is_full(fault) else "the disk does not take it"
    return (
        f"cannot write {path}: {what} ({fault.strerror}). Nothing is lost: "
        "make room and run the same command again"
    )


def _meddled(path: Path, deed: str) -> str:
    return (
        f"another program has {deed} {path} while it was being written. No result is lost: run the "
        "same command again, which writes what the file lacks"
    )


def _not_ours(path: Path, batch_id: str) -> str:
    return f"{path} is not a file of results of batch {batch_id}. Choose another with -o"


def _other_batch(path: Path, found: str, batch_id: str) -> str:
    return (
        f"{path} holds results of batch {found}, not of {batch_id}: the input, the model or the "
        "settings of generation are different ones. Choose another file with -o"
    )


@contextmanager
def beside(path: Path) -> Iterator[LineFile]:
    """An empty file in the folder of ``path``, to be put in its place; gone if that fails.

    Its name is always the same, so that what a killed process leaves is used by the next.
    """
    target = Path(os.path.realpath(path))
    place = target.with_name(f".{target.name}.tmp")
    if place.is_symlink():  # somebody else's: what it points to is not to be written
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
    """Write a file whole and put it in the place of ``path``; how many rows."""
    num_rows = 0
    with beside(path) as file:
        for row in rows:
            file.write(row)
            num_rows += 1
        file.put_in_place_of(path)
    file.close()
    return num_rows
