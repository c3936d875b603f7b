"""The second tier: blocks as files in a folder that several processes may share."""

from __future__ import annotations

import errno
import itertools
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path

from batchkv_cache_store.errors import TierError, TierMisconfigured
from batchkv_cache_store.names import checked
from batchkv_cache_store.seal import Buffer
from batchkv_cache_store.tiers.base import MAX_OBJECT_BYTES, Put, Tier, TierStats, size_of
from batchkv_cache_store.tiers.disk_folder import (
    MAX_ASIDE,
    TEMPORARY_AGE_SECONDS,
    DiskFolder,
    Ledger,
    evict,
)

HIGH_WATERMARK = 0.95
LOW_WATERMARK = 0.85
_ALLOCATION_BYTES = 4096  # file systems take room in such steps, APFS and ext4 among them
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_MAX_VECTORS = 512  # below IOV_MAX everywhere


class Durability(StrEnum):
    """What must have reached the disk before a block counts as put.

    A block lost or torn by a power cut is a miss, so ``NONE`` is right for a cache; the others are
    for folders that are expensive to fill again. ``FILE`` costs a flush a block, ``FULL`` two. On
    macOS a flush reaches the drive, whose own cache may still lose it; the seal tells.
    """

    NONE = "none"  # the operating system writes when it likes
    FILE = "file"  # fsync of the file: what is there after a power cut is whole
    FULL = "full"  # and of its folder: what was put is there


class DiskTier(Tier):
    """Files under ``root``, at most ``max_bytes`` of physical disk.

    Above 95 % of that the least recently used go, until 85 % are left; the room between means that
    the folder is walked once for many puts. A read marks its file as used (mtime). The constructor
    raises TierMisconfigured when the folder cannot be used.
    """

    def __init__(
        self,
        root: Path,
        max_bytes: int,
        durability: Durability = Durability.NONE,
        temporary_age_seconds: float = TEMPORARY_AGE_SECONDS,
    ) -> None:
        if max_bytes < 0:
            raise ValueError(f"max_bytes must not be negative, not {max_bytes}")
        self.name = "disk"
        self.max_bytes: int = max_bytes
        self._high = int(max_bytes * HIGH_WATERMARK)
        self._low = int(max_bytes * LOW_WATERMARK)
        self._durability = durability
        self._folder = DiskFolder(root, temporary_age_seconds)
        self._count = itertools.count()
        self._num_evicted = 0
        try:
            self._folder.make()
            with self._folder.locked() as ledger:
                self._make_room(ledger, 0)
        except OSError as fault:
            raise TierMisconfigured(f"{root} cannot be used: {fault.strerror or fault}") from fault

    def contains_many(self, names: Sequence[str]) -> dict[str, int]:
        found = {}
        for name in names:
            path = self._folder.path(checked(name))
            with _os_errors(path), suppress(FileNotFoundError):
                status = os.stat(path, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    found[name] = status.st_size
        return found

    def get_many(self, names: Sequence[str]) -> dict[str, Buffer]:
        found: dict[str, Buffer] = {}
        for name in names:
            path = self._folder.path(checked(name))
            with _os_errors(path), suppress(FileNotFoundError):
                found[name] = _read(path)
        for name in reversed(found):  # the first is touched last
            self._touch(self._folder.path(name))
        return found

    def put(self, name: str, buffers: Sequence[Buffer]) -> Put:
        path = self._folder.path(checked(name))
        with _os_errors(path):
            if path.exists():
                self._touch(path)
                return Put.PRESENT
            room = -(-size_of(buffers) // _ALLOCATION_BYTES) * _ALLOCATION_BYTES
            temporary = self._reserve(name, room)
            if temporary is None:
                return Put.FULL
            try:
                _write(temporary, buffers, self._durability)
                return self._move_in(temporary, path, room)
            except OSError as fault:
                self._give_up(temporary, room)
                if fault.errno in _NO_ROOM:
                    return Put.FULL
                raise

    def delete(self, name: str) -> None:
        path = self._folder.path(checked(name))
        with _os_errors(path), self._folder.locked() as ledger, suppress(FileNotFoundError):
            num_bytes = _physical_bytes(path)
            path.unlink()
            ledger.num_bytes -= num_bytes

    def set_aside(self, name: str) -> None:
        """Move the file to ``aside/``, which keeps the latest few."""
        path = self._folder.path(checked(name))
        with _os_errors(path), self._folder.locked() as ledger, suppress(FileNotFoundError):
            path.replace(self._folder.aside / name)
            kept = sorted(self._folder.aside.iterdir(), key=lambda file: file.stat().st_mtime_ns)
            for file in kept[:-MAX_ASIDE]:
                ledger.num_bytes -= _physical_bytes(file)
                file.unlink()

    def stats(self) -> TierStats:
        """Walks through the folder: milliseconds for a thousand blocks."""
        with _os_errors(self._folder.root):
            found = self._folder.survey()
        return TierStats(
            found.num_blocks, found.num_bytes, self.max_bytes, self._num_evicted, found.num_foreign
        )

    def _reserve(self, name: str, room: int) -> Path | None:
        """An empty temporary file with its room reserved; None when there is no room."""
        with self._folder.locked() as ledger:
            if not self._make_room(ledger, room):
                return None
            number = next(self._count)  # the folder's lock keeps threads apart too
            temporary = self._folder.temporary / f"{name}.{os.getpid()}.{number}.{room}"
            try:
                temporary.touch(mode=0o600)
            except FileNotFoundError:
                self._folder.make()
                temporary.touch(mode=0o600)
            ledger.num_bytes += room
            return temporary

    def _make_room(self, ledger: Ledger, room: int) -> bool:
        if room and ledger.num_bytes + room <= self._high:
            return True
        if room > self._high:
            return False
        found = self._folder.survey()
        is_of_use = found.num_bytes - found.removable_bytes + room <= self._high
        # At the start even in vain: what is ours must not be the reason that the cap is broken.
        if found.num_bytes + room > self._high and (is_of_use or not room):
            self._num_evicted += evict(found, max(0, self._low - room))
        ledger.num_bytes = found.num_bytes
        return found.num_bytes + room <= self._high

    def _move_in(self, temporary: Path, path: Path, room: int) -> Put:
        with self._folder.locked() as ledger:
            if path.exists():
                temporary.unlink()
                ledger.num_bytes -= room
                return Put.PRESENT
            # Some file systems count a block only when it is on the disk, seconds later.
            num_bytes = max(room, _physical_bytes(temporary))
            try:
                temporary.rename(path)
            except FileNotFoundError:  # the first block with these two digits
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                temporary.rename(path)
            ledger.num_bytes += num_bytes - room
        if self._durability is Durability.FULL:
            _sync_folder(path.parent)
        return Put.STORED

    def _give_up(self, temporary: Path, room: int) -> None:
        with suppress(OSError), self._folder.locked() as ledger:
            temporary.unlink(missing_ok=True)
            ledger.num_bytes -= room

    def _touch(self, path: Path) -> None:
        # Gone meanwhile, or a folder that may only be read: neither is worth a word.
        with suppress(OSError):
            os.utime(path, follow_symlinks=False)


@contextmanager
def _os_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as fault:
        raise TierError(f"{path}: {fault.strerror or fault}") from fault


def _physical_bytes(path: Path) -> int:
    return os.stat(path, follow_symlinks=False).st_blocks * 512


def _read(path: Path) -> bytes:
    """The file's bytes; one that is larger than any block is cut, for its reader to refuse."""
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
        return os.read(descriptor, status.st_size if status.st_size <= MAX_OBJECT_BYTES else 1)
    finally:
        os.close(descriptor)


def _write(temporary: Path, buffers: Sequence[Buffer], durability: Durability) -> None:
    with open(temporary, "wb", buffering=0) as file:
        waiting = [memoryview(buffer) for buffer in buffers if len(buffer)]
        while waiting:
            written = os.writev(file.fileno(), waiting[:_MAX_VECTORS])
            while waiting and written >= len(waiting[0]):
                written -= len(waiting.pop(0))
            if written:
                waiting[0] = waiting[0][written:]
        if durability is not Durability.NONE:
            os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
