"""Files in the home folder that workers keep for later ones: written whole, the oldest removed."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

KERNELS = "kernels"  # the folder of compiled kernels in the home folder
PART = ".tmp"  # the ending of a file that is being written, whose name begins with a dot


def write_whole(file: Path, content: bytes) -> None:
    """Write the whole file or nothing, in a folder of this user alone. Raises OSError."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=".", suffix=PART)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        os.replace(name, file)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def remove(files: Iterable[Path]) -> None:
    """Remove files, but for those that cannot be removed."""
    for file in files:
        with suppress(OSError):
            file.unlink()


def remove_oldest(files: Iterable[Path], most: int) -> None:
    """Keep ``most`` files, those that were written last."""
    remove([file for _, file in sorted(dated(files), reverse=True)][most:])


def dated(files: Iterable[Path]) -> Iterator[tuple[float, Path]]:
    """When each file was written, in seconds since 1970; without those that are gone."""
    for file in files:
        with suppress(OSError):
            yield file.stat().st_mtime, file


def is_ours(found: os.stat_result) -> bool:
    """Whether nobody but this user may write a file or folder."""
    others = stat.S_IWGRP | stat.S_IWOTH
    is_plain = stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)
    return is_plain and found.st_uid == os.geteuid() and not found.st_mode & others
