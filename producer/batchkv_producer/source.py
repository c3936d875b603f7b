"""The input as bytes: opened, digested as it is read, refused when it is no text at all."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from batchkv_producer.errors import InputFileError

Source = str | Path | BinaryIO  # a string is a path
STDIN_NAME = "stdin"

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
    """The part of a binary stream that ``read_rows`` uses; digests all bytes that pass."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._digest = hashlib.sha256()
        self._is_first = True

    def readline(self, limit: int) -> bytes:
        raw = self._stream.readline(limit)
        if self._is_first:
            self._is_first = False
            _refuse_binary(raw)
        self._digest.update(raw)
        return raw

    def digest(self) -> bytes:
        return self._digest.digest()


def _refuse_binary(beginning: bytes) -> None:
    for magic, what in _MAGIC_NUMBERS.items():
        if beginning.startswith(magic):
            mend = "save it as UTF-8" if "text" in what else "it must be lines of JSON or text"
            raise InputFileError(f"the input is {what}: {mend}")
    if b"\x00" in beginning[:1024]:
        raise InputFileError("the input is binary, not lines of JSON or text in UTF-8")


def is_text_file(source: Source) -> bool:
    """True for one prompt a line, which the file's name tells."""
    return isinstance(source, (str, Path)) and Path(source).suffix.lower() == ".txt"


@contextmanager
def opened(source: Source) -> Iterator[BinaryIO]:
    """The input's bytes; every fault of the file, at any time, becomes an InputFileError."""
    try:
        if isinstance(source, (str, Path)):
            with Path(source).open("rb") as stream:
                yield stream
        else:
            yield source
    except OSError as fault:
        raise InputFileError(_file_fault(source_name(source), source, fault)) from fault


def _file_fault(name: str, source: Source, fault: OSError) -> str:
    where = str(source) if isinstance(source, (str, Path)) else name
    if fault.errno == errno.EISDIR:
        return f"{where} is a directory; give a file"
    if fault.errno == errno.ENOENT:
        return f"{where} does not exist"
    if fault.errno in (errno.EACCES, errno.EPERM):
        return f"{where} cannot be read: permission denied"
    return f"{where} cannot be read: {fault.strerror or fault}"


def source_name(source: Source) -> str:
    """What to call the input in messages and as a batch's name; always encodable."""
    name = Path(source).name if isinstance(source, (str, Path)) else STDIN_NAME
    return name.encode("utf-8", "replace").decode("utf-8")
