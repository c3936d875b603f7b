"""Machine code of kernels, kept in the home folder, so that a later process compiles nothing.

A file's name is the digest of all that its code depends on, and the file begins with a digest of
the code. What cannot be read is compiled again; what cannot be written is compiled by each process.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger("batchkv.engine")

FOLDER = "kernels"
MAX_FILES = 500  # the oldest are removed
MAX_BYTES = 2**24  # of a file
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
            with (self.folder / f"{digest}{_ENDING}").open("rb") as stream:
                sealed = stream.read(MAX_BYTES + 1)
        except OSError:
            return None
        seal, code = sealed[:_DIGEST_BYTES], sealed[_DIGEST_BYTES:]
        return code if code and seal == _seal(code) else None

    def _keep(self, digest: str, code: bytes) -> None:
        if self.folder is None or len(code) + _DIGEST_BYTES > MAX_BYTES:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            number, name = tempfile.mkstemp(dir=self.folder, suffix=".part")
            try:
                with os.fdopen(number, "wb") as stream:
                    stream.write(_seal(code) + code)
                Path(name).replace(self.folder / f"{digest}{_ENDING}")
            except BaseException:
                with suppress(OSError):
                    Path(name).unlink()
                raise
            self._remove_oldest()
        except OSError as fault:
            log.debug("compiled kernels are not kept: %s", fault)

    def _remove_oldest(self) -> None:
        assert self.folder is not None
        files = [*self.folder.glob(f"*{_ENDING}")]
        if len(files) <= MAX_FILES:
            return
        dated = []
        for file in files:
            with suppress(OSError):  # another process removed it
                dated.append((file.stat().st_mtime, file))
        for _, file in sorted(dated)[: len(files) - MAX_FILES]:
            with suppress(OSError):
                file.unlink()


def _seal(code: bytes) -> bytes:
    return hashlib.sha256(code).digest()
