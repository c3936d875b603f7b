"""Reading and writing the disk tier's files, whatever somebody else has put in their place."""

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
    """Inside, every OSError becomes a TierError that names the path."""
    try:
        yield
    except OSError as fault:
        raise TierError(f"{path}: {fault.strerror or fault}") from fault


def physical_bytes(path: Path | str) -> int:
    """What a file takes of the disk."""
    return os.stat(path, follow_symlinks=False).st_blocks * 512


def read_file(path: Path, max_bytes: int | None = None) -> bytes:
    """The file's bytes, of those the first ``max_bytes``; nothing for a link, a pipe, a folder.

    Without ``max_bytes``, one that is larger than any block is cut, for its reader to refuse.
    """
    # Not mapped: a file that is cut while it is mapped kills its readers. Not blocking: a pipe.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as fault:
        if fault.errno == errno.ELOOP:
            return b""  # a link where a block should be
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
    """Write the buffers one after the other, to the disk itself if ``is_synced``.

    The file is there already, and empty: a link that somebody put in its place is not followed.
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
    """Let the disk itself have what was moved into the folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
