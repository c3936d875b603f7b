"""What a machine that lost its power leaves at the end of the embedded server's append-only file.

The server cuts a last command that is not whole. Blocks of zeros, which a file system may leave
where data did not arrive, it takes for damage, and does not start. No command ends with a zero:
its last two bytes are a line's end.
"""

from __future__ import annotations

import os
from pathlib import Path

_BLOCK_BYTES = 2**16


def cut_zeros(data: Path) -> int:
    """Cut zeros from the end of the files in a server's data folder; how many bytes.

    To be called while no server runs on it. Raises OSError.
    """
    return sum(_cut(path) for path in sorted(data.glob("appendonlydir/*.incr.aof")))


def _cut(path: Path) -> int:
    with open(path, "r+b") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - _BLOCK_BYTES)
            file.seek(start)
            block = file.read(end - start).rstrip(b"\0")
            end = start + len(block)
            if block:
                break
        if end < size:
            file.truncate(end)
    return size - end
