"""Stores the body of a submit in files, piece by piece, while it arrives."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

from starlette.requests import Request

from batchkv_gateway.errors import invalid
from batchkv_gateway.files.folder import PART, Folder, disk_errors, too_large
from batchkv_gateway.http.asked import feed
from batchkv_producer.intake.source import Inputs, Piece, ReadAs
from batchkv_producer.remote.terms import FilePart


class Spool:
    """The files of one body. ``close`` deletes them.

    Without ``parts`` the body is the one file ``whole``.
    """

    def __init__(
        self, folder: Folder, parts: Sequence[FilePart], whole: FilePart, max_bytes: int
    ) -> None:
        self._max_bytes, self.num_bytes = max_bytes, 0
        self._parts = parts or (whole,)
        self._is_counted = bool(parts)
        self._stack = ExitStack()
        self._files: list[tuple[Path, BinaryIO]] = []
        if sum(part.num_bytes for part in parts) > max_bytes:
            raise too_large(max_bytes)
        with disk_errors(), ExitStack() as unless_made:
            folder.restore()
            unless_made.callback(self._stack.close)
            for part in self._parts:
                descriptor, path = tempfile.mkstemp(dir=folder.path, suffix=f"{PART}{part.suffix}")
                self._stack.callback(_delete, Path(path))
                self._files.append((Path(path), os.fdopen(descriptor, "wb")))
            unless_made.pop_all()
        self._left = [part.num_bytes for part in self._parts]
        self._at = 0

    def write(self, data: bytes) -> None:
        """Append bytes to the file that they belong to. Raises ApiError for too many."""
        self.num_bytes += len(data)
        if self.num_bytes > self._max_bytes:
            raise too_large(self._max_bytes)
        view = memoryview(data)
        while view:
            while self._at < len(self._left) and not self._left[self._at]:
                self._at += 1
            if self._at == len(self._left):
                raise invalid("the body is longer than x-batchkv-files says", "files")
            part = view[: self._left[self._at]]
            with disk_errors():
                self._files[self._at][1].write(part)
            self._left[self._at] -= len(part)
            view = view[len(part) :]

    async def read(self, request: Request) -> None:
        """Store the body of a request."""
        await feed(request, self.write)

    def inputs(self, read_as: ReadAs | None) -> Inputs:
        """The input that was stored. Raises ApiError if the body was cut off."""
        if self._is_counted and any(self._left):
            raise invalid("the body is shorter than x-batchkv-files says", "files")
        for _, file in self._files:
            with disk_errors():
                file.close()
        pairs = zip(self._parts, self._files, strict=True)
        return Inputs(tuple(Piece(path, part.name) for part, (path, _) in pairs), read_as)

    def close(self) -> None:
        """Delete the files."""
        for _, file in self._files:
            with suppress(OSError):
                file.close()
        self._stack.close()


def _delete(path: Path) -> None:
    path.unlink(missing_ok=True)
