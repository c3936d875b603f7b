"""Repairs the end of the embedded server's append-only file after a power failure.

The server itself cuts off a last command that is incomplete. But it takes blocks of zeros for
damage and does not start. A file system may leave such zeros at the end, in place of data that was
not written yet. They can be cut off safely: every command ends with a line break, never with a
zero.
"""

from __future__ import annotations

import os
from pathlib import Path

from batchkv_producer.server.home import Home

_BLOCK_BYTES = 2**16


def cut_zeros(home: Home) -> int:
    """Cut off zeros at the end of the server's files. Returns the number of bytes cut.

    Only to be called while no server runs in this home folder. Raises OSError.
    """
    return sum(_cut(path) for path in sorted(home.data.glob("appendonlydir/*.incr.aof")))


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
