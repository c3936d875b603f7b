"""The input as bytes: opens it, computes its digest while reading, refuses binary content."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from batchkv_producer.errors import InputFileError

ReadAs = Literal["text", "jsonl"]
STDIN_NAME = "stdin"
LOOK_BYTES = 2**16

_MAGIC_NUMBERS = {
    b"\x1f\x8b": "gzip-compressed",
    b"PK\x03\x04": "a zip archive",
    b"\x28\xb5\x2f\xfd": "zstd-compressed",
    b"BZh": "bzip2-compressed",
    b"\xfd7zXZ\x00": "xz-compressed",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
    b"PAR1": "a Parquet file",
    b"SQLite format 3\x00": "a SQLite database",
}


class HashingReader:
    """A binary stream with a view of its first bytes. It digests all bytes that are read."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._digest = hashlib.sha256()
        self._is_first = True
        self._seen = b""

    def look(self) -> bytes:
        """The first bytes. They are not consumed."""
        while len(self._seen) < LOOK_BYTES and (
            more := self._stream.read(LOOK_BYTES - len(self._seen))
        ):
            self._seen += more
        return self._seen

    def readline(self, limit: int) -> bytes:
        if not self._seen:
            return self._passed(self._stream.readline(limit))
        raw = self._seen[: self._seen.find(b"\n") + 1 or None]
        raw = raw if limit < 0 else raw[:limit]
        self._seen = self._seen[len(raw) :]
        if not self._seen and not raw.endswith(b"\n"):
            raw += self._stream.readline(limit if limit < 0 else limit - len(raw))
        return self._passed(raw)

    def read(self, size: int) -> bytes:
        raw, self._seen = self._seen, b""
        return self._passed(raw or self._stream.read(size))

    def lines(self) -> Iterator[bytes]:
        """Every line, however long."""
        while raw := self.readline(-1):
            yield raw

    def digest(self) -> bytes:
        return self._digest.digest()

    def _passed(self, raw: bytes) -> bytes:
        if self._is_first:
            self._is_first = False
            _refuse_binary(raw)
        self._digest.update(raw)
        return raw


def _refuse_binary(beginning: bytes) -> None:
    for magic, what in _MAGIC_NUMBERS.items():
        if beginning.startswith(magic):
            mend = "save it as UTF-8" if "text" in what else "it must be lines of JSON or text"
            raise InputFileError(f"the input is {what}: {mend}")
    if b"\x00" in beginning[:1024]:
        raise InputFileError("the input is binary, not lines of JSON or text in UTF-8")


FileState = tuple[int, int] | None


def state_of(stream: BinaryIO) -> FileState:
    """The size of a file and the time of its last change; None for anything else."""
    try:
        found = os.fstat(stream.fileno())
    except (AttributeError, OSError, ValueError):  # bytes in memory, or a stream of the caller
        return None
    return (found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else None


@dataclass(frozen=True, slots=True)
class Piece:
    """One file or stream of an input. ``start``: the offset at which each reading begins."""

    origin: Path | BinaryIO
    name: str
    start: int | None = None

    @property
    def suffix(self) -> str:
        """The file's suffix, for the kind of its content; empty for a stream."""
        return self.origin.suffix.lower() if isinstance(self.origin, Path) else ""

    @contextmanager
    def opened(self, state: FileState = None) -> Iterator[BinaryIO]:
        """The bytes. Every fault of the file becomes an InputFileError, also while it is read.

        So does a change: a file that is still written would be queued in part. ``state`` is that
        of an earlier reading, if this one has to give the same.
        """
        try:
            if isinstance(self.origin, Path):
                with self.origin.open("rb") as stream, self._unchanged(stream, state):
                    yield stream
            else:
                if self.start is not None:
                    self.origin.seek(self.start)
                with self._unchanged(self.origin, state):
                    yield self.origin
        except OSError as fault:
            raise InputFileError(_file_fault(self._where, fault)) from fault

    @property
    def _where(self) -> str:
        return str(self.origin) if isinstance(self.origin, Path) else self.name

    @contextmanager
    def _unchanged(self, stream: BinaryIO, state: FileState) -> Iterator[None]:
        before = state or state_of(stream)
        yield
        if state_of(stream) != before:
            raise InputFileError(
                f"{self._where} changed while it was read: run the command again when the file is "
                "complete"
            )


@dataclass(frozen=True, slots=True)
class Inputs:
    """Files and streams that make one batch, in this order.

    ``read_as``: ``text`` reads every line as a prompt, ``jsonl`` as JSON. None: by the file's name.
    """

    pieces: tuple[Piece, ...]
    read_as: ReadAs | None = None

    @classmethod
    def of(cls, *sources: str | Path | BinaryIO, read_as: ReadAs | None = None) -> Inputs:
        """The input made of these files and streams."""
        return cls(tuple(_piece(source) for source in sources), read_as)

    @property
    def name(self) -> str:
        """The name of their batch."""
        first, num_more = self.pieces[0].name, len(self.pieces) - 1
        return f"{first} and {num_more} more" if num_more else first

    @property
    def labels(self) -> tuple[str, ...]:
        """A unique name for each piece, with as much of its path as it needs."""
        depth = 1
        names = [piece.name for piece in self.pieces]
        paths = [p.origin if isinstance(p.origin, Path) else Path(p.name) for p in self.pieces]
        while len(set(names)) < len(names) and depth < max(len(path.parts) for path in paths):
            depth += 1
            names = [_encodable("/".join(path.parts[-depth:])) for path in paths]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InputFileError(f"{twice} is given twice")
        return tuple(names)


Source = str | Path | BinaryIO | Inputs  # a string is a path


def inputs_of(source: Source) -> Inputs:
    """Any source as an ``Input`` of pieces."""
    return source if isinstance(source, Inputs) else Inputs.of(source)


def source_name(source: Source) -> str:
    """The input's name in messages and for its batch. It can always be encoded."""
    return inputs_of(source).name


def _piece(source: str | Path | BinaryIO) -> Piece:
    if isinstance(source, str | Path):
        path = Path(source)
        return Piece(path, _encodable(path.name))
    return Piece(source, STDIN_NAME)


def _encodable(name: str) -> str:
    return name.encode("utf-8", "replace").decode("utf-8")


def _file_fault(where: str, fault: OSError) -> str:
    if fault.errno == errno.EISDIR:
        return f"{where} is a directory; give a file"
    if fault.errno == errno.ENOENT:
        return f"{where} does not exist"
    if fault.errno in (errno.EACCES, errno.EPERM):
        return f"{where} cannot be read: permission denied"
    return f"{where} cannot be read: {fault.strerror or fault}"
