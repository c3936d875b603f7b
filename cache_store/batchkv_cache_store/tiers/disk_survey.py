"""One walk through the disk tier's folder: what is there, and what would go first."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from batchkv_cache_store.blocks.names import is_block_name, is_name

_HEX = frozenset("0123456789abcdef")


class Rank(IntEnum):
    """What goes first when room is short; within a rank, what was used least recently."""

    ASIDE = 0
    BLOCK = 1
    MANIFEST = 2  # small, and no use of it is seen


class File(NamedTuple):
    """A file of ours; ``num_bytes`` are physical. Files sort in the order in which they go."""

    rank: Rank
    used_ns: int
    num_bytes: int
    path: str

    @property
    def name(self) -> str:
        """Its last part: the name of a block or a manifest."""
        return os.path.basename(self.path)


@dataclass(slots=True)
class Survey:
    """What one walk found; bytes are physical. Each file of ours is in one of the three lists.

    ``stale``: what writers that died have left.
    """

    num_bytes: int = 0
    num_foreign: int = 0
    removable: list[File] = field(default_factory=list)
    pinned: list[File] = field(default_factory=list)
    stale: list[File] = field(default_factory=list)

    @property
    def removable_bytes(self) -> int:
        """Bytes that eviction could free."""
        return sum(file.num_bytes for file in self.removable)

    @property
    def pinned_bytes(self) -> int:
        """Bytes that it could not."""
        return sum(file.num_bytes for file in self.pinned)

    @property
    def num_blocks(self) -> int:
        """Blocks in use."""
        return sum(file.rank is Rank.BLOCK for file in (*self.removable, *self.pinned))

    @property
    def aside(self) -> list[File]:
        """Damaged files that were set aside."""
        return [file for file in self.removable if file.rank is Rank.ASIDE]

    def hold_pins(self, pins: dict[str, int], max_bytes: int) -> None:
        """Take pinned files from ``removable``: those pinned first, up to ``max_bytes``.

        ``pins``: names and when they were pinned. More than ``max_bytes`` was pinned when the cap
        has been lowered since; the rest is as if it were not.
        """
        found = [file for file in self.removable if file.rank and file.name in pins]
        num_bytes = 0
        for file in sorted(found, key=lambda file: (pins[file.name], file.name)):
            num_bytes += file.num_bytes
            if num_bytes > max_bytes:
                break
            self.pinned.append(file)
        if self.pinned:
            held = set(self.pinned)
            self.removable = [file for file in self.removable if file not in held]

    def evict(self, max_bytes: int) -> int:
        """Remove files until the folder has at most ``max_bytes``; returns the blocks removed."""
        removed = 0
        for file in sorted(self.removable):
            if self.num_bytes <= max_bytes:
                break
            removed += self.remove(file) and file.rank is Rank.BLOCK
        return removed

    def remove(self, file: File) -> bool:
        """Remove one file from the disk, unless we may not; the lists are left as they are."""
        try:
            os.unlink(file.path)
        except FileNotFoundError:
            pass
        except PermissionError:  # it lies in another user's folder
            return False
        self.num_bytes -= file.num_bytes
        return True

    def count_foreign(self, entry: os.DirEntry[str]) -> None:
        """Count what is not ours: its bytes too, for they are gone from the disk all the same."""
        with suppress(FileNotFoundError):
            self.num_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
            self.num_foreign += 1

    def count_file(self, entry: os.DirEntry[str], rank: Rank) -> None:
        """Count a file of ours, or what somebody has put in its place."""
        if not entry.is_file(follow_symlinks=False):
            self.count_foreign(entry)
            return
        with suppress(FileNotFoundError):
            status = entry.stat(follow_symlinks=False)
            num_bytes = status.st_blocks * 512
            self.num_bytes += num_bytes
            self.removable.append(File(rank, status.st_mtime_ns, num_bytes, entry.path))

    def count_temporary(self, entry: os.DirEntry[str], max_age_seconds: float) -> None:
        """Count a file that is being written: ``<name>.<pid>.<count>.<bytes reserved>``."""
        name, _, reserved = entry.name.rpartition(".")
        is_ours = is_name(".".join(name.split(".")[:2])) and entry.is_file(follow_symlinks=False)
        if not is_ours or not (reserved.isascii() and reserved.isdigit()):
            self.count_foreign(entry)
            return
        with suppress(FileNotFoundError):
            status = entry.stat(follow_symlinks=False)
            num_bytes = status.st_blocks * 512
            if time.time() - status.st_mtime > max_age_seconds:
                self.stale.append(File(Rank.ASIDE, status.st_mtime_ns, num_bytes, entry.path))
            else:  # what it will take was reserved, not what it has now
                num_bytes = max(num_bytes, int(reserved))
            self.num_bytes += num_bytes


def entries(folder: Path | str) -> list[os.DirEntry[str]]:
    """A folder's entries; none when it is gone or no folder."""
    try:
        with os.scandir(folder) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError):
        return []


def walk_blocks(blocks: Path) -> Iterator[tuple[os.DirEntry[str], Rank | None]]:
    """Everything below the folder of blocks, leaf by leaf; rank None for what is foreign."""
    for entry in [] if blocks.is_symlink() else entries(blocks):
        leaves = _inside(entry)
        if leaves is None:
            yield entry, None
            continue
        for leaf in leaves:
            files = _inside(leaf)
            if files is None:
                yield leaf, None
                continue
            for file in files:
                is_here = is_name(file.name) and file.name.startswith(entry.name + leaf.name)
                rank = Rank.BLOCK if is_block_name(file.name) else Rank.MANIFEST
                yield file, rank if is_here else None


def _inside(folder: os.DirEntry[str]) -> list[os.DirEntry[str]] | None:
    """What is in a folder of the fan-out; None for what is no such folder, or is closed to us."""
    if folder.name not in _HEX or folder.is_symlink():  # a link may lead out of the folder
        return None
    try:
        return entries(folder.path)
    except PermissionError:  # another user's worker made it
        return None
