"""Recognizes errors of a full disk, and names the disk. Also syncs files.

While its disk is full, the embedded server refuses writes and pings (MISCONF). It still answers
reads, and accepts writes again when there is room.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from pathlib import Path

from redis import Redis
from redis.exceptions import RedisError, ResponseError

from batchkv_producer.errors import FullHomeError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
PROBE_BYTES = 16384
_WORDS = tuple(os.strerror(number) for number in FULL)


def is_full(fault: OSError) -> bool:
    """Whether this error means that a disk or a quota is full."""
    return fault.errno in FULL


def sync(descriptor: int) -> None:
    """Wait until what was written to an open file is on the disk. Raises OSError."""
    if sys.platform == "darwin":  # there, fsync leaves data in the drive's own cache
        try:
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
        except OSError:  # network file systems lack this call
            pass
    os.fsync(descriptor)


def takes_no_writes(fault: RedisError) -> bool:
    """Whether a server refused a command because it cannot write to its disk."""
    return "MISCONF" in str(fault)


def ping(connection: Redis) -> None:
    """Raise RedisError if the server does not answer. One that only refuses writes is fine."""
    try:
        connection.ping()
    except ResponseError as fault:
        if not takes_no_writes(fault):
            raise


def full_home(folder: Path, why: str) -> FullHomeError:
    """The error that names the home folder on the full disk."""
    found = next((words for words in _WORDS if words in why), "")
    problem = f"is full ({found})" if found else f"cannot be written ({why[:200]})"
    return FullHomeError(
        f"the disk of {folder} {problem}: make room there and run the same command again. "
        "Nothing that was queued is lost"
    )


def refuse_full(folder: Path) -> None:
    """Raise FullHomeError if there is no room for a small file in the folder."""
    probe = folder / f".room.{os.getpid()}"
    try:
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            left = PROBE_BYTES
            while left:
                left -= os.write(descriptor, bytes(left))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as fault:
        if is_full(fault):
            raise full_home(folder, os.strerror(fault.errno or 0)) from fault
    finally:
        probe.unlink(missing_ok=True)
