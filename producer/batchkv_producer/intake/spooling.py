"""Copies pipes and standard input to a temporary file.

A pipe can be read once, and a run reads its input twice. The copy is in the home folder, or in
TMPDIR where there is none. The copy has no name, so nobody else can open it, and it disappears with
this process however that ends.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from batchkv_producer.disk import is_full
from batchkv_producer.errors import BatchkvError, InputFileError, UsageError
from batchkv_producer.intake.source import STDIN_NAME, Inputs, Piece, ReadAs
from batchkv_producer.server.home import home_from_environment

COPY_BYTES = 2**20
_OWN_DESCRIPTORS = (Path("/dev/fd"), Path("/proc/self/fd"))


class SpoolError(BatchkvError):
    """The input of a pipe cannot be stored: the disk is full or broken."""

    exit_code = 4


@contextmanager
def gathered(
    files: Sequence[Path], read_as: ReadAs | None, note: Callable[[str], None]
) -> Iterator[Inputs]:
    """The input that a command names; ``-`` is standard input. Copies are deleted at the end."""
    if sum(str(file) == "-" for file in files) > 1:
        raise UsageError("- (standard input) is given twice")
    with ExitStack() as stack:
        pieces = [_piece(file, position, stack, note) for position, file in enumerate(files, 1)]
        yield Inputs(tuple(pieces), read_as)


def _piece(file: Path, position: int, stack: ExitStack, note: Callable[[str], None]) -> Piece:
    if str(file) == "-":
        return _standard_input(stack, note)
    if not _is_pipe(file):
        return Inputs.of(file).pieces[0]
    name = f"input-{position}" if file.parent in _OWN_DESCRIPTORS else Inputs.of(file).name
    try:
        with file.open("rb") as pipe:
            return _spooled(pipe, name, stack)
    except OSError as fault:
        raise InputFileError(f"{file} cannot be read: {fault.strerror or fault}") from fault


def _standard_input(stack: ExitStack, note: Callable[[str], None]) -> Piece:
    if sys.stdin is None:
        raise InputFileError("there is no standard input: name a file, or pipe prompts in")
    stream = sys.stdin.buffer
    if sys.stdin.isatty():
        note("reading rows from the terminal; Ctrl-D on a line of its own ends them")
    try:
        if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            return Piece(stream, STDIN_NAME, start=stream.tell())
    except (OSError, ValueError):  # a stream without a file number can be copied
        pass
    return _spooled(stream, STDIN_NAME, stack)


def _is_pipe(file: Path) -> bool:
    try:
        mode = file.stat().st_mode
    except OSError:  # the reader reports the fault
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISSOCK(mode)


def _spooled(stream: BinaryIO, name: str, stack: ExitStack) -> Piece:
    folder = _folder()
    try:
        copy = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (the stack closes it)
        stack.callback(copy.close)
        while copy.write(stream.read(COPY_BYTES)) == COPY_BYTES:
            pass  # a short read is the end; a terminal would accept more input after it
        copy.flush()
    except OSError as fault:
        what = "the disk is full" if is_full(fault) else (fault.strerror or str(fault))
        raise SpoolError(
            f"cannot store {name} in {folder}: {what}. Make room, or save it as a file first"
        ) from fault
    return Piece(cast(BinaryIO, copy), name, start=0)


def _folder() -> str:
    """Where copies lie."""
    home = home_from_environment().path
    return str(home) if os.access(home, os.W_OK) and home.is_dir() else tempfile.gettempdir()
