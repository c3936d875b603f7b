"""The second tier: blocks as files in a folder that several processes may share."""

from __future__ import annotations

import errno
import itertools
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

from batchkv_cache_store.blocks.names import checked, is_name
from batchkv_cache_store.blocks.seal import Buffer
from batchkv_cache_store.errors import TierAway, TierError, TierMisconfigured
from batchkv_cache_store.tiers.base import Entry, Put, Swept, Tier, TierStats, bound, size_of
from batchkv_cache_store.tiers.disk_files import (
    os_errors,
    physical_bytes,
    read_file,
    sync_folder,
    write_file,
)
from batchkv_cache_store.tiers.disk_folder import (
    MAX_ASIDE,
    TEMPORARY_AGE_SECONDS,
    DiskFolder,
    Ledger,
)
from batchkv_cache_store.tiers.disk_survey import walk_blocks

HIGH_WATERMARK = 0.95
LOW_WATERMARK = 0.85
PINNED_SHARE = 0.5
_ALLOCATION_BYTES = 4096  # the allocation unit of file systems such as APFS and ext4
# Errors of a volume that is missing.
_AWAY = {errno.EIO, errno.ENXIO, errno.ENODEV, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT}
_AWAY |= {errno.EROFS}  # systems mount a disk with faults read-only
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# Errors of a block that cannot be read: a folder of the fan-out may be another user's.
_NOT_HERE = (FileNotFoundError, PermissionError)


class Durability(StrEnum):
    """How far a block must be written to the disk before its put returns.

    A block that a power cut loses or damages is a miss, so ``NONE`` is right for a cache. The
    others are for folders that are expensive to fill again. ``FILE`` costs one flush a block,
    ``FULL`` two. On macOS a flush reaches the drive, whose own cache may still lose the data. The
    seal finds such damage.
    """

    NONE = "none"  # the operating system writes at its own time
    FILE = "file"  # fsync of the file: after a power cut each file is whole
    FULL = "full"  # fsync of its folder, too: after a power cut each block that was put is there


class DiskTier(Tier):
    """Files under ``root``, at most ``max_bytes`` of physical disk.

    Above 95 % of the cap the least recently used files are evicted until 85 % are left. So one walk
    through the folder serves many puts. A read marks its file as used (mtime). Pinned blocks stay.
    They may take half of the cap.

    The constructor raises TierMisconfigured if the folder cannot be used. It does not raise if this
    may pass: the volume is missing (``DiskFolder.check_volume``), full or read-only, another
    process holds the lock, or a foreign object (a pipe, for example) is in the place of a file.
    Then the first ``check`` raises the error, and a later call makes the folder.

    ``is_guest``: for commands that read a folder which workers fill, perhaps under another cap. A
    guest makes no folder, and removes only what its caller names.
    """

    can_pin = True

    def __init__(
        self,
        root: Path,
        max_bytes: int,
        durability: Durability = Durability.NONE,
        temporary_age_seconds: float = TEMPORARY_AGE_SECONDS,
        is_guest: bool = False,
    ) -> None:
        if max_bytes < 0:
            raise ValueError(f"max_bytes must not be negative, not {max_bytes}")
        self.name = "disk"
        self.max_bytes: int = max_bytes
        self._high = int(max_bytes * HIGH_WATERMARK)
        self._low = int(max_bytes * LOW_WATERMARK)
        self._durability = durability
        max_pinned_bytes = int(max_bytes * PINNED_SHARE)
        self._folder = DiskFolder(root, max_pinned_bytes, temporary_age_seconds, is_guest)
        self._count = itertools.count()
        self._found_at_start: TierError | None = None
        if is_guest:
            if not root.is_dir():
                raise TierMisconfigured(f"{root} is no folder: {self._folder.why_missing()}")
            return
        try:
            self._folder.make()
            with self._folder.locked() as ledger:
                self._make_room(ledger, 0)
        except TierAway:
            return  # ``check`` raises it, and so does every other method until the volume is there
        except TierError as fault:
            self._found_at_start = fault
        except OSError as fault:
            text = f"{fault.filename or root} cannot be used: {fault.strerror or fault}"
            if fault.errno not in _AWAY | _NO_ROOM and not _is_meddling(fault, root):
                raise TierMisconfigured(text) from fault
            self._found_at_start = TierError(text)

    def check(self) -> None:
        """Raise TierError if the folder or its volume is missing now.

        The first call also raises an error that the constructor found.
        """
        found, self._found_at_start = self._found_at_start, None
        if found is not None:
            raise found
        with os_errors(self._folder.root):
            self._folder.check_volume()
            os.stat(self._folder.root.parent)

    def contains_many(self, names: Sequence[str]) -> dict[str, int]:
        found = {}
        for name in names:
            path = self._folder.path(checked(name))
            with os_errors(path), suppress(*_NOT_HERE):
                self._folder.check(path)
                status = os.stat(path, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    found[name] = status.st_size
        if not found:  # a missing volume looks like an empty folder
            self.check()
        return found

    def get_many(
        self, names: Sequence[str], sizes: Mapping[str, int] | None = None
    ) -> dict[str, Buffer]:
        found: dict[str, Buffer] = {}
        for name in names:
            path = self._folder.path(checked(name))
            with os_errors(path), suppress(*_NOT_HERE):
                self._folder.check(path)
                found[name] = read_file(path, None if sizes is None else bound(sizes, name))
        for name in reversed(found):  # the first counts as the latest used
            self._touch(self._folder.path(name))
        return found

    def get_heads(self, names: Sequence[str], num_bytes: int) -> dict[str, Buffer]:
        found: dict[str, Buffer] = {}
        for name in names:
            path = self._folder.path(checked(name))
            with os_errors(path), suppress(*_NOT_HERE):
                self._folder.check(path)
                found[name] = read_file(path, num_bytes)
        return found

    def iter_names(self) -> Iterator[Entry]:
        """List names, reading one of 256 folders at a time."""
        with os_errors(self._folder.root):
            for entry, rank in walk_blocks(self._folder.blocks):
                if rank is not None and entry.is_file(follow_symlinks=False):
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        yield Entry(entry.name, status.st_size, status.st_mtime)

    def put(self, name: str, buffers: Sequence[Buffer]) -> Put:
        path = self._folder.path(checked(name))
        with os_errors(path):
            self._folder.check(path)
            if path.exists():
                self._touch(path)
                return Put.PRESENT
            room = -(-size_of(buffers) // _ALLOCATION_BYTES) * _ALLOCATION_BYTES
            temporary = self._reserve(name, room)
            if temporary is None:
                return Put.FULL
            try:
                is_synced = self._durability is not Durability.NONE
                write_file(temporary, buffers, is_synced=is_synced)
                return self._move_in(temporary, path, room)
            except OSError as fault:
                self._give_up(temporary, room)
                if fault.errno in _NO_ROOM:
                    return Put.FULL
                raise

    def delete(self, name: str) -> None:
        path = self._folder.path(checked(name))
        with os_errors(path), self._folder.locked() as ledger, suppress(FileNotFoundError):
            self._folder.check(path)
            num_bytes = physical_bytes(path)
            path.unlink()
            ledger.num_bytes -= num_bytes

    def set_aside(self, name: str) -> None:
        """Move the file to ``aside/``, which keeps the latest ``MAX_ASIDE``."""
        path = self._folder.path(checked(name))
        with os_errors(path), self._folder.locked() as ledger, suppress(FileNotFoundError):
            self._folder.check(path, self._folder.aside / name)
            path.replace(self._folder.aside / name)
            aside = [file for file in self._folder.aside.iterdir() if is_name(file.name)]
            for file in sorted(aside, key=lambda file: file.stat().st_mtime_ns)[:-MAX_ASIDE]:
                ledger.num_bytes -= physical_bytes(file)
                file.unlink()

    def pin(self, names: Sequence[str]) -> bool:
        wanted = {checked(name) for name in names}
        with os_errors(self._folder.root), self._folder.locked():
            pinned = set(self._folder.pins())
            found = self._folder.survey()
            files = [file for file in (*found.removable, *found.pinned) if file.rank]
            num_bytes = sum(file.num_bytes for file in files if file.name in pinned | wanted)
            if num_bytes > self._folder.max_pinned_bytes:
                return False
            self._folder.add_pins(wanted & {file.name for file in files})
            return True

    def unpin(self, names: Sequence[str]) -> None:
        with os_errors(self._folder.root):
            self._folder.remove_pins([checked(name) for name in names])

    def pinned(self) -> list[str]:
        with os_errors(self._folder.root):
            return self._folder.pins()

    def sweep(self, *, is_dry_run: bool = False) -> Swept:
        with os_errors(self._folder.root), self._folder.locked() as ledger:
            found = self._folder.survey()
            files = [*found.aside, *found.stale]
            if not is_dry_run:
                for file in files:
                    found.remove(file)
                ledger.num_bytes = found.num_bytes
        return Swept(len(found.aside), len(found.stale), sum(file.num_bytes for file in files))

    def stats(self) -> TierStats:
        """Count by a walk through the folder: milliseconds for a thousand blocks."""
        with os_errors(self._folder.root):
            found = self._folder.survey()
            num_evicted = self._folder.num_evicted()
        return TierStats(
            found.num_blocks,
            found.num_bytes,
            self.max_bytes,
            num_evicted,
            found.num_foreign,
            num_aside=len(found.aside),
            num_pinned=len(found.pinned),
            pinned_bytes=found.pinned_bytes,
        )

    def _reserve(self, name: str, room: int) -> Path | None:
        """Make an empty temporary file and reserve its room. Returns None if there is no room."""
        with self._folder.locked() as ledger:
            if not self._make_room(ledger, room):
                return None
            number = next(self._count)  # safe, because threads too exclude each other by the lock
            temporary = self._folder.temporary / f"{name}.{os.getpid()}.{number}.{room}"
            self._folder.check(temporary)
            try:
                # A process of the same id, or another user, may have left a file of this name.
                temporary.unlink(missing_ok=True)
                temporary.touch(mode=0o600, exist_ok=False)
            except FileNotFoundError:
                self._folder.make()
                temporary.touch(mode=0o600, exist_ok=False)
            ledger.num_bytes += room
            return temporary

    def _make_room(self, ledger: Ledger, room: int) -> bool:
        if room and ledger.num_bytes + room <= self._high:
            return True
        if room > self._high:
            return False
        found = self._folder.survey()
        is_of_use = found.num_bytes - found.removable_bytes + room <= self._high
        # At the start, evict even if that does not suffice: blocks must not exceed the cap.
        if found.num_bytes + room > self._high and (is_of_use or not room):
            ledger.num_evicted += found.evict(max(0, self._low - room))
        ledger.num_bytes = found.num_bytes
        return found.num_bytes + room <= self._high

    def _move_in(self, temporary: Path, path: Path, room: int) -> Put:
        with self._folder.locked() as ledger:
            if path.exists():
                temporary.unlink()
                ledger.num_bytes -= room
                return Put.PRESENT
            # Some file systems count a file's blocks only seconds later, when they are on the disk.
            num_bytes = max(room, physical_bytes(temporary))
            try:
                temporary.rename(path)
            except FileNotFoundError:  # the first block with these two digits
                for folder in (path.parent.parent, path.parent):
                    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                temporary.rename(path)
            ledger.num_bytes += num_bytes - room
        if self._durability is Durability.FULL:
            sync_folder(path.parent)
        return Put.STORED

    def _give_up(self, temporary: Path, room: int) -> None:
        with suppress(OSError), self._folder.locked() as ledger:
            temporary.unlink(missing_ok=True)
            ledger.num_bytes -= room

    def _touch(self, path: Path) -> None:
        # The file may be gone, or the folder read-only; both do no harm.
        with suppress(OSError):
            os.utime(path, follow_symlinks=False)


def _is_meddling(fault: OSError, root: Path) -> bool:
    """Whether the error comes from a foreign object in the place of a file of the folder.

    Anyone with write access can put one there. It must not keep workers from starting. An error
    without a file name comes from the ledger, which is open then.
    """
    if isinstance(fault, PermissionError):
        return False
    return fault.filename is None or root in Path(os.fsdecode(fault.filename)).parents
