"""One walk through the disk tier's folder: its files, and the order in which they are evicted."""

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
    """Lower ranks are evicted first; in a rank, the least recently used file."""

    ASIDE = 0
    BLOCK = 1
    MANIFEST = 2  # manifests are small, and reads do not mark them as used


class File(NamedTuple):
    """A file of batchkv; ``num_bytes`` are physical. Files sort in the order of eviction."""

    rank: Rank
    used_ns: int
    num_bytes: int
    path: str

    @property
    def name(self) -> str:
        """The last part of the path: the name of a block or a manifest."""
        return os.path.basename(self.path)


@dataclass(slots=True)
class Survey:
    """The result of one walk; bytes are physical. Each file of batchkv is in one of three lists.

    ``stale``: files of writers that died.
    """

    num_bytes: int = 0
    num_foreign: int = 0
    removable: list[File] = field(default_factory=list)
    pinned: list[File] = field(default_factory=list)
    stale: list[File] = field(default_factory=list)

    @property
    def removable_bytes(self) -> int:
        """The bytes that eviction could free."""
        return sum(file.num_bytes for file in self.removable)

    @property
    def pinned_bytes(self) -> int:
        """The bytes that pins protect from eviction."""
        return sum(file.num_bytes for file in self.pinned)

    @property
    def num_blocks(self) -> int:
        """The number of blocks in use."""
        return sum(file.rank is Rank.BLOCK for file in (*self.removable, *self.pinned))

    @property
    def aside(self) -> list[File]:
        """The damaged files that were set aside."""
        return [file for file in self.removable if file.rank is Rank.ASIDE]

    def hold_pins(self, pins: dict[str, int], max_bytes: int) -> None:
        """Move pinned files from ``removable`` to ``pinned``, the oldest pins first.

        ``pins``: names and the times when they were pinned. If the pins have more than
        ``max_bytes``, because the cap was lowered since, the latest ones have no effect.
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
        """Remove files until the folder has at most ``max_bytes``. Returns how many were blocks."""
        removed = 0
        for file in sorted(self.removable):
            if self.num_bytes <= max_bytes:
                break
            removed += self.remove(file) and file.rank is Rank.BLOCK
        return removed

    def remove(self, file: File) -> bool:
        """Remove one file from the disk, if its folder allows it; the lists do not change."""
        try:
            os.unlink(file.path)
        except FileNotFoundError:
            pass
        except PermissionError:  # it lies in another user's folder
            return False
        self.num_bytes -= file.num_bytes
        return True

    def count_foreign(self, entry: os.DirEntry[str]) -> None:
        """Count a foreign file, with its bytes, because they take disk space, too."""
        with suppress(FileNotFoundError):
            self.num_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
            self.num_foreign += 1

    def count_file(self, entry: os.DirEntry[str], rank: Rank) -> None:
        """Count a file of batchkv, or a foreign object in its place."""
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
            else:  # its reserved size counts, not its size so far
                num_bytes = max(num_bytes, int(reserved))
            self.num_bytes += num_bytes


def entries(folder: Path | str) -> list[os.DirEntry[str]]:
    """A folder's entries; none if it is gone or not a folder."""
    try:
        with os.scandir(folder) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError):
        return []


def walk_blocks(blocks: Path) -> Iterator[tuple[os.DirEntry[str], Rank | None]]:
    """All files below the folder of blocks, leaf by leaf; rank None for a foreign one."""
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
    """The entries of a folder of the fan-out; None for anything else, or without permission."""
    if folder.name not in _HEX or folder.is_symlink():  # a link may lead out of the folder
        return None
    try:
        return entries(folder.path)
    except PermissionError:  # another user's worker made it
        return None
