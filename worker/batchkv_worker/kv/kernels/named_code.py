"""Machine code that MLX finds by the name of a kernel, so that no launch has to give it.

MLX knows a kernel that is compiled already by its name and a hash of its code. It hashes the code
at each launch: 9 to 43 KB. That took 6 % of the time in which an H200's host launched a step. But
before MLX takes the code, it looks for a file in its folder of compiled code (``jit_module.cpp``).
So the code lies there under the name that MLX gives to a kernel without code, and no call has any.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

from batchkv_worker.kept_files import PART, dated, remove, write_whole

log = logging.getLogger("batchkv.engine")

NO_CODE = b""
MAX_FILES = 500  # the oldest are removed
SURE_SECONDS = 86_400.0  # so long a file stays: a process may be about to need it
_HASH = 0x553E93901E462A6E  # of no bytes, as GNU's C++ library has it
CODE, NAMES = f"_{_HASH:x}.ptx", f"_{_HASH:x}.txt"  # the endings of MLX's files


@dataclass(frozen=True, slots=True)
class NamedCode:
    """``folder`` is the one in which MLX looks."""

    folder: Path

    def keep(self, name: str, code: bytes) -> bool:
        """Whether MLX finds ``code`` if it is asked for the kernel ``name`` and given NO_CODE."""
        file, names = self.folder / f"{name}{CODE}", self.folder / f"{name}{NAMES}"
        line = f"{name}\t{name}\n".encode()
        try:
            if _has(names, line) and _has(file, code):
                os.utime(names)
                os.utime(file)
                return True
            write_whole(names, line)  # first: code without names is swept (``mlx_kernels.py``)
            write_whole(file, code)
        except OSError as fault:
            log.debug("launches give MLX the code of %s: %s", name, fault)
            return False
        self._sweep()
        return True

    def _sweep(self) -> None:
        """Remove the oldest files, and what a killed process left."""
        before = time.time() - SURE_SECONDS
        for ending in (CODE, NAMES):
            by_age = sorted(dated(self.folder.glob(f"*{ending}")), reverse=True)
            remove(file for written, file in by_age[MAX_FILES:] if written < before)
        parts = dated(self.folder.glob(f".*{PART}"))
        remove([file for written, file in parts if written < before])


def is_named(file: Path) -> bool:
    """Whether a file in MLX's folder is one that ``NamedCode`` wrote."""
    return file.name.endswith((CODE, NAMES))


def _has(file: Path, content: bytes) -> bool:
    try:
        return file.read_bytes() == content
    except FileNotFoundError:
        return False
