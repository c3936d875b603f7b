"""Machine code of kernels, kept in the home folder, so that a later process compiles nothing.

A file's name is the digest of all that its code depends on, and the file begins with a digest of
both. What cannot be read is compiled again; what cannot be written is compiled by each process.
Code runs on the device, so only what nobody but this user may write is read.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from batchkv_worker.kept_files import PART, dated, is_ours, remove, remove_oldest, write_whole

log = logging.getLogger("batchkv.engine")

MAX_FILES = 500  # the oldest are removed
MAX_BYTES = 2**24  # of a file
LOST_SECONDS = 86_400.0  # after which a file that a process began is of one that was killed
_ENDING = ".cubin"
_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class KeptCode:
    """``folder`` is made when something is kept; None keeps nothing."""

    folder: Path | None = None

    def of(self, digest: str, compile_it: Callable[[], bytes]) -> bytes:
        """The code of that digest; ``compile_it`` makes it where none is kept."""
        found = self._read(digest)
        if found is None:
            found = compile_it()
            self._keep(digest, found)
        return found

    def _read(self, digest: str) -> bytes | None:
        if self.folder is None:
            return None
        try:
            if not is_ours(self.folder.lstat()):
                return None
            file = os.open(self.folder / f"{digest}{_ENDING}", os.O_RDONLY | os.O_NOFOLLOW)
            with os.fdopen(file, "rb") as stream:
                if not is_ours(os.fstat(stream.fileno())):
                    return None
                sealed = stream.read(MAX_BYTES + 1)
        except OSError:
            return None
        seal, code = sealed[:_DIGEST_BYTES], sealed[_DIGEST_BYTES:]
        return code if code and seal == _seal(digest, code) else None

    def _keep(self, digest: str, code: bytes) -> None:
        if self.folder is None or len(code) + _DIGEST_BYTES > MAX_BYTES:
            return
        try:
            write_whole(self.folder / f"{digest}{_ENDING}", _seal(digest, code) + code)
        except OSError as fault:
            log.debug("compiled kernels are not kept: %s", fault)
            return
        remove_oldest(self.folder.glob(f"*{_ENDING}"), MAX_FILES)
        lost = time.time() - LOST_SECONDS
        remove([file for when, file in dated(self.folder.glob(f".*{PART}")) if when < lost])


def _seal(digest: str, code: bytes) -> bytes:
    return hashlib.sha256(digest.encode() + b"\0" + code).digest()
