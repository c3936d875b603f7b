"""Reads and writes the disk tier's files, safe from links and pipes that others put there."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from batchkv_cache_store.blocks.seal import Buffer
from batchkv_cache_store.errors import TierError
from batchkv_cache_store.tiers.base import MAX_OBJECT_BYTES

_MAX_VECTORS = 512  # below IOV_MAX everywhere


@contextmanager
def os_errors(path: Path) -> Iterator[None]:
    """Inside the block, every OSError becomes a TierError that names the path."""
    try:
        yield
    except OSError as fault:
        raise TierError(f"{path}: {fault.strerror or fault}") from fault


def physical_bytes(path: Path | str) -> int:
    """The bytes of disk that a file takes."""
    return os.stat(path, follow_symlinks=False).st_blocks * 512


def read_file(path: Path, max_bytes: int | None = None) -> bytes:
    """The file's first ``max_bytes`` bytes; empty for a link, a pipe or a folder.

    Without ``max_bytes``, only one byte of a file larger than any block is read, so that the
    reader refuses it.
    """
    # The file is not mapped, because truncating a mapped file kills its readers. O_NONBLOCK is for
    # a pipe, which would block.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as fault:
        if fault.errno == errno.ELOOP:
            return b""  # it is a link
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return b""
        if max_bytes is None:
            max_bytes = status.st_size if status.st_size <= MAX_OBJECT_BYTES else 1
        return os.read(descriptor, min(status.st_size, max_bytes))
    finally:
        os.close(descriptor)


def write_file(path: Path, buffers: Sequence[Buffer], *, is_synced: bool) -> None:
    """Write the buffers one after the other into an empty file; ``is_synced``: and flush it.

    The file must exist. A link in its place is not followed.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "wb", buffering=0) as file:
        waiting = [memoryview(buffer) for buffer in buffers if len(buffer)]
        while waiting:
            written = os.writev(file.fileno(), waiting[:_MAX_VECTORS])
            while waiting and written >= len(waiting[0]):
                written -= len(waiting.pop(0))
            if written:
                waiting[0] = waiting[0][written:]
        if is_synced:
            os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush the folder's entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
