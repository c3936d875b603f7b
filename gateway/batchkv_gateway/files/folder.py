"""The folder of the files' contents. Each is named by the id of its file and its SHA-256.

A content is written beside its place, synced, and then renamed. So a name always has the whole
content. Several gateways may share the folder.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from batchkv_gateway.errors import FULL, TOO_LARGE, UNAVAILABLE, ApiError
from batchkv_producer.disk import is_full, sync
from batchkv_producer.errors import UsageError
from batchkv_producer.server.home import refuse_foreign

log = logging.getLogger(__name__)

STALE_SECONDS = 86_400  # an upload that was written last so long ago was interrupted
PART = ".part"


class Folder:
    """The folder of a home folder, for its owner only."""

    def __init__(self, home: Path) -> None:
        self.path = home / "gateway"
        try:
            for folder in (home, self.path):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as fault:
            raise UsageError(
                f"cannot make {self.path}: {fault.strerror}. Set BATCHKV_HOME to a folder that "
                "you can write"
            ) from fault
        for folder in (home, self.path):
            refuse_foreign(folder)

    def content(self, name: str) -> Path:
        """The path of a content. It need not exist."""
        return self.path / name

    def begin(self, max_bytes: int) -> Incoming:
        """A new content, which may have at most this many bytes."""
        with disk_errors():
            self.restore()
            return Incoming(self.path, max_bytes)

    def restore(self) -> None:
        """Make the folder again if it was deleted; not so its home, which may be a disk."""
        self.path.mkdir(mode=0o700, exist_ok=True)

    def delete(self, name: str) -> None:
        """Delete a content, if it is there."""
        self.content(name).unlink(missing_ok=True)

    def delete_interrupted(self) -> None:
        """Delete what interrupted uploads left."""
        oldest = time.time() - STALE_SECONDS
        for path in self.path.glob(f"*{PART}*"):
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < oldest:
                    path.unlink()


class Incoming:
    """A content that is being written. It leaves nothing in the folder unless it is kept."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        descriptor, name = tempfile.mkstemp(dir=folder, suffix=PART)
        self._path = Path(name)
        self._file = os.fdopen(descriptor, "wb", buffering=2**20)
        self._digest = hashlib.sha256()
        self.num_bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes. Raises ApiError if there are too many, or no room for them."""
        self.num_bytes += len(data)
        if self.num_bytes > self._max_bytes:
            raise too_large(self._max_bytes)
        self._digest.update(data)
        with disk_errors():
            self._file.write(data)

    def sha256(self) -> str:
        """The digest of what was written, as 64 hex digits."""
        return self._digest.hexdigest()

    def keep(self, name: str) -> None:
        """Sync the content and give it its name in the folder. Raises ApiError for a full disk."""
        with disk_errors():
            self._file.flush()
            sync(self._file.fileno())
            self._file.close()
            os.replace(self._path, self._folder / name)
            descriptor = os.open(self._folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def __enter__(self) -> Incoming:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(OSError):
            self._file.close()
        self._path.unlink(missing_ok=True)


def too_large(max_bytes: int) -> ApiError:
    """The error for a file of more bytes than are allowed."""
    return ApiError(
        TOO_LARGE,
        f"the file is larger than {max_bytes:,} bytes: split it, or ask the operator for a larger "
        "--max-file",
        code="file_too_large",
        param="file",
    )


@contextmanager
def disk_errors() -> Iterator[None]:
    """Inside, a full disk and a folder that cannot be written become an ApiError."""
    try:
        yield
    except OSError as fault:
        if not is_full(fault):
            log.warning("the gateway's folder: %s", fault)
            message = f"the gateway cannot write its folder ({fault.strerror}): tell its operator"
            raise ApiError(UNAVAILABLE, message, code="folder_unusable") from fault
        message = "the gateway's disk is full: try again when there is room"
        raise ApiError(FULL, message, code="disk_full") from fault
